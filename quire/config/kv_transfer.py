"""Which KV connector an engine uses, read from the JSON of `kv_transfer_config`. Names and meaning are vLLM's. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from quire.config.base import check_settings, setting
from quire.config.json_object import errors_of, parse_object
from quire.errors import ConfigError, nearest
from quire.utils.checks import check_int, check_text, shown

FIELD = "kv_transfer_config"
ROLES = ("kv_producer", "kv_consumer", "kv_both")
FAILURE_POLICIES = ("recompute", "fail")
LOOPBACK = "127.0.0.1"
MODULE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")
# Keys of vLLM that say nothing here, with the values that are accepted because they ask for nothing.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "kv_buffer_device": (None, "cpu", "auto"),
    "kv_buffer_size": (None, 1e9),
    "kv_rank": (None, 0),
    "kv_parallel_size": (None, 1),
    "enable_permute_local_kv": (None, False),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class KVTransferConfig:
    """A connector and what it may do.

    Attributes:
        kv_connector: name of a built-in connector, of a plugin, or of a class in `kv_connector_module_path`.
        kv_role: kv_producer saves, kv_consumer loads, kv_both does both.
        kv_connector_extra_config: the connector's own settings.
        kv_connector_module_path: module that the class is imported from; the operator's choice, never a request's.
        kv_load_failure_policy: what becomes of a request whose blocks could not be loaded: "recompute" computes them,
            "fail" ends it with an error.
        kv_load_timeout_s: seconds that a request waits for a load before its tokens are computed; 0 = as long as it
            takes.
        engine_id: by which other engines name this one; None = a random one.
        kv_ip, kv_port: where a connector that needs a socket binds it.
    """

    kv_connector: str
    kv_role: str = "kv_both"
    kv_connector_extra_config: Mapping[str, Any] = field(default_factory=dict)
    kv_connector_module_path: str | None = None
    kv_load_failure_policy: str = "recompute"
    kv_load_timeout_s: float = 30.0
    engine_id: str | None = None
    kv_ip: str = LOOPBACK
    kv_port: int = 14579

    def __post_init__(self) -> None:
        with errors_of(FIELD):
            for name in ("kv_connector", "kv_ip"):
                check_text(name, getattr(self, name))
            if self.engine_id is not None:
                check_text("engine_id", self.engine_id)
            check_int("kv_port", self.kv_port, 0, 65535)
        if not self.kv_connector:
            raise _error("kv_connector is empty", "name a connector, for example ExampleConnector")
        _check_choice("kv_role", self.kv_role, ROLES)
        _check_choice("kv_load_failure_policy", self.kv_load_failure_policy, FAILURE_POLICIES)
        timeout = self.kv_load_timeout_s
        if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not 0 <= timeout <= 86400:
            raise _error(f"kv_load_timeout_s={shown(timeout)} is not a number of seconds", "give 0 to 86400")
        if not isinstance(self.kv_connector_extra_config, Mapping):
            raise _error(
                f"kv_connector_extra_config={shown(self.kv_connector_extra_config)} is not a JSON object",
                'write {"key": value}',
            )
        path = self.kv_connector_module_path
        if path is not None and not (isinstance(path, str) and MODULE.fullmatch(path)):
            raise _error(
                f"kv_connector_module_path={shown(path)} is not the name of a module",
                "give a dotted name such as my_package.my_connector, not a file",
            )

    @property
    def is_kv_producer(self) -> bool:
        """Whether it saves blocks."""
        return self.kv_role != "kv_consumer"

    @property
    def is_kv_consumer(self) -> bool:
        """Whether it loads blocks."""
        return self.kv_role != "kv_producer"

    @property
    def fails_requests(self) -> bool:
        """Whether a request ends with an error when its blocks could not be loaded."""
        return self.kv_load_failure_policy == "fail"


@dataclass(frozen=True, slots=True, kw_only=True)
class KVTransferSettings:
    """Where keys and values are sent to and come from, beside the cache."""

    kv_transfer_config: str | None = setting(
        None, "JSON object: the KV connector, with keys as in vLLM: kv_connector, kv_role, kv_connector_extra_config, "
        "kv_connector_module_path, kv_load_failure_policy, engine_id, kv_ip, kv_port; and kv_load_timeout_s.",
        is_json=True,
    )  # fmt: skip

    def __post_init__(self) -> None:
        check_settings(self)
        parse_kv_transfer_config(self.kv_transfer_config)

    @property
    def connector(self) -> KVTransferConfig | None:
        """What `kv_transfer_config` says; None = there is no connector."""
        return parse_kv_transfer_config(self.kv_transfer_config)

    def of_replica(self, index: int) -> KVTransferSettings:
        """Those of one of several engine cores: named, and reached, apart from the others, as in vLLM."""
        connector = self.connector
        if connector is None or not index:
            return self
        assert self.kv_transfer_config is not None, "there is a connector"
        own = json.loads(self.kv_transfer_config)
        if connector.engine_id is not None:
            own["engine_id"] = f"{connector.engine_id}_dp{index}"
        if connector.kv_port:
            own["kv_port"] = connector.kv_port + index
        return KVTransferSettings(kv_transfer_config=json.dumps(own))


def parse_kv_transfer_config(text: str | None) -> KVTransferConfig | None:
    """The configuration in JSON `text`; None = no connector, as for an empty object.

    Raises:
        ConfigError: it is not a JSON object, has an unknown key (the nearest valid one is named) or a wrong value.
    """
    return parse_kv_transfer(parse_object(FIELD, text, example='{"kv_connector": "ExampleConnector"}'))


def parse_kv_transfer(values: Mapping[str, Any]) -> KVTransferConfig | None:
    """The configuration in an object; None where nothing is in it. Raises as `parse_kv_transfer_config`."""
    known = [one.name for one in fields(KVTransferConfig)]
    given: dict[str, Any] = {}
    for name, value in values.items():
        if name in NEUTRAL:
            if not any(value == one and type(value) is type(one) for one in NEUTRAL[name]):
                raise _error(f"{name}={shown(value)} is not supported", f"leave out {name}")
        elif name not in known:
            close = nearest(str(name), known)
            hint = f"did you mean {close!r}?" if close else f"keys are {', '.join(known)}"
            raise _error(f"{shown(name)} is not a known key", hint)
        elif value is not None:
            given[name] = value
    if not given:
        return None
    if "kv_connector" not in given:
        raise _error("kv_connector is missing", "name a connector, for example ExampleConnector")
    return KVTransferConfig(**given)


def _check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise _error(f"{name}={shown(value)} is not one of {', '.join(choices)}", f"use {choices[-1]}")


def _error(message: str, hint: str) -> ConfigError:
    return ConfigError(f"{FIELD}: {message}", hint=hint, field=FIELD)
