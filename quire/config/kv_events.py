"""Publisher of the prefix cache's events. Read from the JSON of `kv_events_config`; names are vLLM's."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import Any

from quire.config.json_object import errors_of, parse_object
from quire.errors import ConfigError
from quire.utils.checks import check_bool, check_int, check_text, shown

FIELD = "kv_events_config"
PUBLISHERS = ("zmq", "null")
DEFAULT_ENDPOINT = "tcp://127.0.0.1:5557"
ENDPOINT = re.compile(r"tcp://(\*|\[[0-9a-fA-F:]+\]|[\w.-]+):(\d{1,5})|ipc://\S+", re.ASCII)
MAX_COUNT = 10_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class KVEventsConfig:
    """What is published of the prefix cache.

    Attributes:
        enable_kv_cache_events: whether anything is.
        publisher: "zmq"; "null" makes events and drops them.
        endpoint: bound by the publisher; its port grows by the data parallel rank.
        replay_endpoint: bound for consumers that missed something; None = none.
        buffer_steps: batches kept for these.
        hwm: batches that ZMQ keeps for a consumer that is slow, before that one misses some.
        max_queue_size: batches that may wait to be sent; beyond it they are dropped, and consumers start anew.
        topic: first frame of every message.
    """

    enable_kv_cache_events: bool = False
    publisher: str = "zmq"
    endpoint: str = DEFAULT_ENDPOINT
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""

    def __post_init__(self) -> None:
        with errors_of(FIELD):
            check_bool("enable_kv_cache_events", self.enable_kv_cache_events)
            for name in ("buffer_steps", "hwm", "max_queue_size"):
                check_int(name, getattr(self, name), 0 if name == "buffer_steps" else 1, MAX_COUNT)
            check_text("topic", self.topic)
            check_text("publisher", self.publisher)
        if self.publisher not in PUBLISHERS:
            raise ConfigError(
                f"{FIELD}: publisher {shown(self.publisher)} is not a known publisher", hint="use zmq", field=FIELD
            )
        _check_endpoint("endpoint", self.endpoint)
        if self.replay_endpoint is not None:
            _check_endpoint("replay_endpoint", self.replay_endpoint)


def parse_kv_events_config(text: str | None) -> KVEventsConfig:
    """The configuration in JSON `text`; None = nothing is published.

    Raises:
        ConfigError: it is no JSON object, has an unknown name (the nearest valid one is named), or a wrong value.
    """
    known = [field.name for field in fields(KVEventsConfig)]
    values = parse_object(FIELD, text, known, example='{"enable_kv_cache_events": true}')
    config = KVEventsConfig(**{name: value for name, value in values.items() if value is not None})
    _check_needs(config)
    return config


def _check_needs(config: KVEventsConfig) -> None:
    """Refuse keys that were set and have no effect."""
    without = {"enable_kv_cache_events": config.enable_kv_cache_events, "replay_endpoint": config.replay_endpoint}
    for one in fields(KVEventsConfig):
        needed = "replay_endpoint" if one.name == "buffer_steps" else "enable_kv_cache_events"
        if one.name != needed and getattr(config, one.name) != one.default and not without[needed]:
            raise ConfigError(
                f"{FIELD}: {one.name} has no effect without {needed}",
                hint=f"set {needed}, or leave out {one.name}", field=FIELD,
            )  # fmt: skip


def _check_endpoint(name: str, value: Any) -> None:
    match = ENDPOINT.fullmatch(value) if isinstance(value, str) else None
    if match is None or (match[2] is not None and int(match[2]) > 65535):
        raise ConfigError(
            f"{FIELD}: {name} {shown(value)} is not a valid address",
            hint="use tcp://HOST:PORT or ipc://PATH",
            field=FIELD,
        )
