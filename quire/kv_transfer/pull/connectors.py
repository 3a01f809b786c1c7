"""The connectors for prefill and decode apart, by transport. Names and keys are vLLM's where it has them."""

from __future__ import annotations

from quire.config.kv_transfer import FIELD
from quire.errors import ConfigError
from quire.kv_transfer.pull.connector import PULL_KEYS, PullConnector, PullSettings
from quire.kv_transfer.pull.params import is_loopback
from quire.kv_transfer.pull.transport import InlineTransport, Transport
from quire.utils.checks import shown


class TCPConnector(PullConnector):
    """Blocks over TCP connections of its own; needs no package."""

    quire_contract = 1
    extra_config_keys = PULL_KEYS

    def make_transport(self, settings: PullSettings) -> Transport:
        """As `PullConnector`."""
        return InlineTransport()


class NixlConnector(PullConnector):
    """Blocks by one-sided reads of NIXL."""

    quire_contract = 1
    extra_config_keys = (*PULL_KEYS, "backends")

    def make_transport(self, settings: PullSettings) -> Transport:
        """As `PullConnector`."""
        from quire.kv_transfer.pull.nixl import NixlTransport  # late: the package is optional

        backends = self.config.kv_connector_extra_config.get("backends", ["UCX"])
        if not (isinstance(backends, list) and backends and all(isinstance(one, str) for one in backends)):
            raise ConfigError(
                f"{FIELD}: backends={shown(backends)} is not a list of names", hint='for example ["UCX"]', field=FIELD
            )
        return NixlTransport(backends, is_local=is_loopback(self.config.kv_ip))


class MooncakeConnector(PullConnector):
    """Blocks by one-sided reads of Mooncake's transfer engine."""

    quire_contract = 1
    extra_config_keys = (*PULL_KEYS, "mooncake_protocol")

    def make_transport(self, settings: PullSettings) -> Transport:
        """As `PullConnector`."""
        from quire.kv_transfer.pull.mooncake import MooncakeTransport  # late: as above

        protocol = self.config.kv_connector_extra_config.get("mooncake_protocol", "tcp")
        if not isinstance(protocol, str):
            raise ConfigError(
                f"{FIELD}: mooncake_protocol={shown(protocol)} is not a name", hint='"tcp" or "rdma"', field=FIELD
            )
        return MooncakeTransport(settings.advertised_host, protocol)
