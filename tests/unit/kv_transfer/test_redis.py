"""Blocks in a Redis server, against a fake of the package's contract: silent, full, damaged and wrong servers."""

from __future__ import annotations

import re
import sys
import types
from typing import Any

import numpy as np
import pytest

from quire.config.kv_transfer import KVTransferConfig
from quire.errors import ConfigError
from quire.kv_transfer import server_pause
from quire.kv_transfer.block_files import DamagedBlockError
from quire.kv_transfer.conformance import check_connector
from quire.kv_transfer.connector import KVConnectorRole
from quire.kv_transfer.redis import RedisBlocks, RedisConnector
from tests.unit.kv_transfer.test_block_files import BLOCK, NAME, OTHER, SHAPES
from tests.unit.kv_transfer.test_layout import LAYOUT


class RedisError(Exception): ...


class ResponseError(RedisError): ...


class ServerGoneError(RedisError): ...


class Client:
    """The calls of `redis.Redis`, with the values in a dictionary; `raises` is what each call raises."""

    kept: dict[str, bytes]
    raises: Exception | None
    num_calls: int

    @classmethod
    def from_url(cls, url: str, **settings: Any) -> Client:
        if not re.match(r"(rediss?|unix)://", url):
            raise ValueError("a URL must have a scheme")
        assert settings["socket_timeout"] == settings["socket_connect_timeout"] == 1.0
        return cls()

    def pipeline(self, transaction: bool) -> Pipeline:
        assert not transaction
        return Pipeline(self)

    def _called(self) -> None:
        Client.num_calls += 1
        if Client.raises is not None:
            raise Client.raises

    def set(self, key: str, value: bytes, px: int) -> bool:
        assert px > 0 and isinstance(value, bytes)
        self._called()
        Client.kept[key] = value
        return True

    def getrange(self, key: str, start: int, end: int) -> bytes:
        self._called()
        return Client.kept.get(key, b"")[start : end + 1]

    def pexpire(self, key: str, ms: int) -> bool:
        return key in Client.kept

    def delete(self, key: str) -> int:
        self._called()
        return int(Client.kept.pop(key, None) is not None)


class Pipeline:
    def __init__(self, client: Client) -> None:
        self._client, self._keys = client, []  # type: ignore[var-annotated]

    def exists(self, key: str) -> None:
        self._keys.append(key)

    def execute(self) -> list[int]:
        self._client._called()
        return [int(key in Client.kept) for key in self._keys]


@pytest.fixture(autouse=True)
def package(monkeypatch: pytest.MonkeyPatch) -> None:
    Client.kept, Client.raises, Client.num_calls = {}, None, 0
    module, backoff, retry = (types.ModuleType(name) for name in ("redis", "redis.backoff", "redis.retry"))
    for name, value in {
        "Redis": Client, "RedisError": RedisError, "ResponseError": ResponseError, "ConnectionError": ServerGoneError,
    }.items():  # fmt: skip
        setattr(module, name, value)
    backoff.NoBackoff, retry.Retry = tuple, lambda backoff, retries, errors: None  # type: ignore[attr-defined]
    for one in (module, backoff, retry):
        monkeypatch.setitem(sys.modules, one.__name__, one)


def config(**extra: Any) -> KVTransferConfig:
    return KVTransferConfig(kv_connector="RedisConnector", kv_connector_extra_config=extra)


def blocks(**extra: Any) -> RedisBlocks:
    return RedisConnector(config(**extra), KVConnectorRole.WORKER, LAYOUT).open_storage()


def test_the_connector_keeps_the_contract():
    assert check_connector(config()) == {}


def test_a_block_comes_back_under_its_name_and_prefix_alone():
    storage = blocks(key_prefix="a:")
    storage.store(NAME, BLOCK)
    assert storage.num_first([NAME, OTHER]) == 1 and storage.num_first([OTHER, NAME]) == 0
    assert all(map(np.array_equal, storage.load(NAME, SHAPES), BLOCK))
    assert blocks(key_prefix="b:").num_first([NAME]) == 0
    with pytest.raises(OSError, match="any longer"):
        storage.load(OTHER, SHAPES)


def test_damaged_cut_longer_and_swapped_values_are_refused():
    storage = blocks()
    storage.store(NAME, BLOCK)
    ((key, value),) = Client.kept.items()
    for damaged in (value[:-1], value + b"x", value[:50] + bytes([value[50] ^ 1]) + value[51:], value[:10]):
        Client.kept[key] = damaged
        with pytest.raises(DamagedBlockError):
            storage.load(NAME, SHAPES)
    Client.kept[key.replace(NAME.hex(), OTHER.hex())] = value
    with pytest.raises(DamagedBlockError):
        storage.load(OTHER, SHAPES)
    storage.remove(NAME)
    assert storage.num_first([NAME]) == 0


def test_a_server_that_does_not_answer_is_left_alone_for_a_while(monkeypatch):
    storage = blocks()
    Client.raises = RedisError("timed out")
    assert storage.num_first([NAME]) == 0 and Client.num_calls == 1
    Client.raises = None
    for call in (lambda: storage.store(NAME, BLOCK), lambda: storage.load(NAME, SHAPES)):
        with pytest.raises(OSError, match="a moment ago"):
            call()
    storage.remove(NAME)
    assert Client.num_calls == 1
    monkeypatch.setattr(server_pause.time, "monotonic", lambda: 10.0**9)
    storage.store(NAME, BLOCK)
    assert storage.num_first([NAME]) == 1


def test_a_server_that_is_full_keeps_answering_lookups():
    storage = blocks()
    storage.store(NAME, BLOCK)
    Client.raises = ResponseError("OOM command not allowed when used memory > 'maxmemory'")
    with pytest.raises(OSError, match="refused: OOM"):
        storage.store(OTHER, BLOCK)
    Client.raises = None
    assert storage.num_first([NAME]) == 1


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"url": "127.0.0.1:6379"}, "not the address of a Redis server"),
        ({"url": 7}, "not the address of a Redis server"),
        ({"ttl_s": 0}, "ttl_s=0"),
        ({"timeout_s": "soon"}, "timeout_s='soon'"),
        ({"password_file": "/nowhere"}, "password_file"),
        ({"key_prefix": 3}, "key_prefix"),
    ],
)
def test_wrong_settings_are_refused_by_name(extra, message):
    with pytest.raises(ConfigError, match=message):
        blocks(**extra)


def test_the_package_is_named_where_it_is_not_there(monkeypatch):
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(ConfigError, match="needs the package redis"):
        blocks()
