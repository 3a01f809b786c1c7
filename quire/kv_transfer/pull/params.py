"""`kv_transfer_params` of a response of a prefill engine, which come back to a decode engine: the typed boundary.

The keys are those of vLLM's NixlConnector, so routers that carry them for vLLM carry ours: `do_remote_decode` asks the
prefill engine to keep the prompt's blocks, `do_remote_prefill` says to the decode engine where they are.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec

from quire.config.kv_transfer import FIELD, LOOPBACK
from quire.errors import ConfigError, ValidationError
from quire.utils.checks import shown

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=512)]
Network = ipaddress.IPv4Network | ipaddress.IPv6Network


class RemotePrefill(msgspec.Struct, frozen=True, kw_only=True):
    """Where the blocks of a prompt are.

    Attributes:
        remote_engine_id, remote_request_id: the prefill engine, and its name of the request.
        remote_host, remote_port: where it answers.
        remote_num_tokens: that it keeps, of whole blocks.
        remote_layout: digest of the layout of its blocks; empty = unknown until it is asked.
        tp_size, dcp_size, pp_size: ranks that share a block.
    """

    remote_engine_id: Name
    remote_request_id: Name
    remote_host: Name
    remote_port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    remote_num_tokens: Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
    remote_layout: Annotated[str, msgspec.Meta(max_length=64)] = ""
    tp_size: int = 1
    dcp_size: int = 1
    pp_size: int = 1

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        return self.remote_host, self.remote_port

    def to_params(self, block_ids: Sequence[int]) -> dict[str, Any]:
        """What a response carries, for the request that goes to the decode engine."""
        flags = {"do_remote_prefill": True, "do_remote_decode": False, "transfer_mode": "pull"}
        return {**flags, "remote_block_ids": [list(block_ids)], **msgspec.structs.asdict(self)}


def parse_remote_prefill(params: Mapping[str, Any]) -> RemotePrefill | None:
    """Where the blocks of a request's prompt are; None = the request says nothing of them.

    Raises:
        ValidationError: it says something that cannot be; the message names the key.
    """
    if params.get("do_remote_prefill") is not True:
        return None
    try:
        remote = msgspec.convert(dict(params), RemotePrefill)
    except msgspec.ValidationError as error:
        raise ValidationError(
            f"kv_transfer_params: {error}", hint="send what the prefill engine's response had, as it is",
            field="kv_transfer_params",
        ) from None  # fmt: skip
    if (remote.tp_size, remote.dcp_size, remote.pp_size) != (1, 1, 1):
        raise ValidationError(
            f"kv_transfer_params: the prefill engine has tp_size={remote.tp_size}, dcp_size={remote.dcp_size}, "
            f"pp_size={remote.pp_size}; blocks of several ranks cannot be read",
            hint="prefill with an engine of one rank", field="kv_transfer_params",
        )  # fmt: skip
    return remote


class AllowedHosts:
    """Which hosts a request may name: what it says makes this engine connect there.

    Args:
        values: addresses, networks ("10.0.0.0/8") and names, as the operator gave them; None = loopback.
        own: the engine's own address.

    Raises:
        ConfigError: they are not a list of such texts.
    """

    def __init__(self, values: Any, own: str) -> None:
        if values is not None and not (isinstance(values, list) and all(isinstance(one, str) for one in values)):
            raise ConfigError(
                f"{FIELD}: allowed_hosts={shown(values)} is not a list of addresses",
                hint='for example ["10.0.0.0/8", "prefill-1"]', field=FIELD,
            )  # fmt: skip
        given = ["127.0.0.0/8", "::1", "localhost", own] if values is None else values
        self._names = {one.lower() for one in given}
        self._networks = [network for network in map(_network, given) if network is not None]

    def __contains__(self, host: str) -> bool:
        if host.lower() in self._names:
            return True
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            return False
        return any(address in network for network in self._networks)


def _network(text: str) -> Network | None:
    try:
        return ipaddress.ip_network(text, strict=False)
    except ValueError:
        return None  # a name


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches it."""
    return host in AllowedHosts(None, LOOPBACK)
