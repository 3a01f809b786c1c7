"""RedisConnector: blocks in a Redis or Valkey server, which several engines share; by the `redis` package.

A block is one value with a checksum, under the digest of the layout and the block's name. The server bounds what is
kept, by `maxmemory` with a policy such as allkeys-lru; `ttl_s` bounds how long. Everything happens on the threads of
`StoredBlocks`, with a time limit for each call; after a call that failed the server is left alone for a while.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from quire.config.kv_transfer import FIELD, LOOPBACK, KVTransferConfig
from quire.errors import ConfigError
from quire.kv_transfer.block_values import key_of, pack, unpack, value_bytes
from quire.kv_transfer.layout import KVCacheLayout
from quire.kv_transfer.server_pause import ServerPause
from quire.kv_transfer.stored_blocks import StoredBlocks
from quire.logger import get_logger
from quire.utils.checks import shown

logger = get_logger(__name__)

Result = TypeVar("Result")

NUM_AT_ONCE = 256
"""Names that are looked up in one message."""


class RedisConnector(StoredBlocks):
    """Blocks in the server at `url`."""

    quire_contract = 1
    extra_config_keys = ("url", "ttl_s", "timeout_s", "password_file", "key_prefix")

    def open_storage(self) -> RedisBlocks:
        """As `StoredBlocks`."""
        return RedisBlocks(make_client(self.config), self.config, self.layout)


def make_client(config: KVTransferConfig) -> Any:
    """A client that waits for no call longer than `timeout_s`, and connects with the first call.

    Raises:
        ConfigError: the package is not there, or the address is not one.
    """
    try:
        import redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry
    except ImportError as error:
        raise ConfigError(
            f"{FIELD}: {config.kv_connector} needs the package redis: {error}",
            hint="pip install 'quire[redis]'", field=FIELD,
        ) from error  # fmt: skip
    extra = config.kv_connector_extra_config
    url, timeout_s = extra.get("url", f"redis://{LOOPBACK}:6379/0"), read_number(config, "timeout_s", 1.0)
    more: dict[str, Any] = {}
    if extra.get("password_file") is not None:
        try:
            more["password"] = Path(extra["password_file"]).expanduser().read_text().strip()
        except (OSError, TypeError, ValueError) as error:
            raise ConfigError(
                f"{FIELD}: password_file={shown(extra['password_file'])} cannot be read: {error}",
                hint="give the path of a file", field=FIELD,
            ) from None  # fmt: skip
    again = Retry(NoBackoff(), 1, (redis.ConnectionError,))  # on a new connection: servers close those that are idle
    try:
        return redis.Redis.from_url(
            url, socket_timeout=timeout_s, socket_connect_timeout=timeout_s, retry=again, **more
        )
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{FIELD}: url={shown(url)} is not the address of a Redis server: {error}",
            hint="for example redis://127.0.0.1:6379/0, rediss://... for TLS, unix:///path", field=FIELD,
        ) from None  # fmt: skip


def read_number(config: KVTransferConfig, name: str, default: float) -> float:
    """A number of seconds of `kv_connector_extra_config`. Raises ConfigError."""
    value = config.kv_connector_extra_config.get(name, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 10**9:
        raise ConfigError(
            f"{FIELD}: {name}={shown(value)} is not a number of seconds above 0",
            hint=f"leave it out for {default:g}", field=FIELD,
        )  # fmt: skip
    return float(value)


class RedisBlocks:
    """Blocks in a server; used by one thread.

    Args:
        client: a `redis.Redis`.
    """

    def __init__(self, client: Any, config: KVTransferConfig, layout: KVCacheLayout) -> None:
        self._client = client
        self._ttl_ms = int(1000 * read_number(config, "ttl_s", 86400.0))
        prefix = config.kv_connector_extra_config.get("key_prefix", "quire:")
        if not isinstance(prefix, str) or len(prefix) > 256:
            raise ConfigError(f"{FIELD}: key_prefix={shown(prefix)} is not a short text", field=FIELD)
        self._prefix, self._digest = prefix, layout.digest
        self._pause = ServerPause()

    def num_first(self, names: Sequence[bytes]) -> int:
        """As `BlockStorage`; a server that does not answer has none."""
        num_found = 0
        for start in range(0, len(names), NUM_AT_ONCE):
            keys = [self._key(name) for name in names[start : start + NUM_AT_ONCE]]
            try:
                found = self._call(partial(self._exist, keys))
            except OSError as error:
                logger.warning("blocks cannot be looked up: %s", error)
                return num_found
            num_here = next((number for number, is_there in enumerate(found) if is_there != 1), len(keys))
            num_found += num_here
            if num_here < len(keys):
                break
        return num_found

    def _exist(self, keys: Sequence[str]) -> list[Any]:
        pipeline = self._client.pipeline(transaction=False)
        for key in keys:
            pipeline.exists(key)
        results: list[Any] = pipeline.execute()
        return results

    def store(self, name: bytes, tensors: Sequence[np.ndarray]) -> None:
        """As `BlockStorage`."""
        key = self._key(name)
        value = pack(key, tensors).tobytes()
        self._call(lambda: self._client.set(key, value, px=self._ttl_ms))

    def load(self, name: bytes, shapes: Sequence[tuple[int, ...]]) -> list[np.ndarray]:
        """As `BlockStorage`; no more than a block is read, whatever the server has."""
        key = self._key(name)
        value = self._call(lambda: self._client.getrange(key, 0, value_bytes(shapes)))
        if not value:
            raise OSError(f"block {name.hex()[:16]} is not in the server any longer")
        arrays = unpack(key, np.frombuffer(value, dtype=np.uint8), shapes)
        self._call(lambda: self._client.pexpire(key, self._ttl_ms))
        return arrays

    def remove(self, name: bytes) -> None:
        """As `BlockStorage`."""
        try:
            self._call(lambda: self._client.delete(self._key(name)))
        except OSError as error:
            logger.warning("a damaged block cannot be deleted: %s", error)

    def _key(self, name: bytes) -> str:
        return self._prefix + key_of(self._digest, name)

    def _call(self, call: Callable[[], Result]) -> Result:
        """What a call returns; whatever it raises is an OSError."""
        import redis

        self._pause.check()
        try:
            return call()
        except redis.ResponseError as error:  # it answers: it is full, read-only, or wants a password
            raise OSError(f"the server refused: {error}") from error
        except (redis.RedisError, OSError, ValueError) as error:
            self._pause.begin()
            raise ConnectionError(f"{type(error).__name__}: {error}") from error
