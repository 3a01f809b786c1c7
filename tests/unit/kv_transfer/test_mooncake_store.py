"""Blocks in Mooncake's store, against a fake of its contract: what it loses, refuses or damages is computed."""

from __future__ import annotations

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
from quire.kv_transfer.mooncake_store import MooncakeBlocks, MooncakeStoreConnector
from tests.unit.kv_transfer.test_block_files import BLOCK, NAME, OTHER, SHAPES
from tests.unit.kv_transfer.test_layout import LAYOUT


class Store:
    """`MooncakeDistributedStore` with the values in a dictionary; `status` is what a master that is gone answers."""

    kept: dict[str, bytes]
    status: int
    set_up: list[tuple[Any, ...]]

    def setup(self, *settings: Any) -> int:
        Store.set_up.append(settings)
        return Store.status

    def put(self, key: str, value: bytes) -> int:
        if Store.status == 0:
            Store.kept.setdefault(key, value)
        return Store.status

    def get(self, key: str) -> bytes:
        return b"" if Store.status else Store.kept.get(key, b"")

    def batch_is_exist(self, keys: list[str]) -> list[int]:
        if Store.status == -2:
            raise RuntimeError("the binding raises")
        return [Store.status or int(key in Store.kept) for key in keys]

    def remove(self, key: str) -> int:
        return Store.status if Store.status or Store.kept.pop(key, None) else -704


@pytest.fixture(autouse=True)
def package(monkeypatch: pytest.MonkeyPatch) -> None:
    Store.kept, Store.status, Store.set_up = {}, 0, []
    store = types.ModuleType("mooncake.store")
    store.MooncakeDistributedStore = Store  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mooncake", types.ModuleType("mooncake"))
    monkeypatch.setitem(sys.modules, "mooncake.store", store)


def blocks(role: KVConnectorRole = KVConnectorRole.WORKER, **extra: Any) -> MooncakeBlocks:
    config = KVTransferConfig(kv_connector="MooncakeStoreConnector", kv_connector_extra_config=extra)
    return MooncakeStoreConnector(config, role, LAYOUT).open_storage()


def test_the_connector_keeps_the_contract():
    assert check_connector(KVTransferConfig(kv_connector="MooncakeStoreConnector")) == {}


def test_the_memory_is_given_by_the_half_that_has_blocks():
    blocks(global_segment_size=7, master_server_address="a:1")
    assert Store.set_up[-1] == ("127.0.0.1", "P2PHANDSHAKE", 7, 128 << 20, "tcp", "", "a:1")
    blocks(KVConnectorRole.SCHEDULER, global_segment_size=7)
    assert Store.set_up[-1][2] == 0


def test_blocks_come_back_or_are_refused():
    storage = blocks()
    storage.store(NAME, BLOCK)
    assert storage.num_first([NAME, OTHER, NAME]) == 1 and storage.num_first([OTHER]) == 0
    assert all(map(np.array_equal, storage.load(NAME, SHAPES), BLOCK))
    ((key, value),) = Store.kept.items()
    for damaged in (value[:-1], value[:-1] + bytes([value[-1] ^ 1])):
        Store.kept[key] = damaged
        with pytest.raises(DamagedBlockError):
            storage.load(NAME, SHAPES)
    storage.remove(NAME)
    with pytest.raises(OSError, match="any longer"):
        storage.load(NAME, SHAPES)


@pytest.mark.parametrize("status", [-900, -2])
def test_a_master_that_is_gone_costs_computations(status, monkeypatch):
    storage = blocks()
    storage.store(NAME, BLOCK)
    Store.status = status
    assert storage.num_first([NAME]) == 0
    for call in (lambda: storage.store(OTHER, BLOCK), lambda: storage.load(NAME, SHAPES)):
        with pytest.raises(OSError, match="a moment ago"):
            call()
    storage.remove(NAME)
    Store.status = 0
    monkeypatch.setattr(server_pause.time, "monotonic", lambda: 10.0**9)
    assert storage.num_first([NAME]) == 1 and storage.load(NAME, SHAPES)


def test_a_full_store_is_asked_again():
    storage = blocks()
    Store.status = -200
    with pytest.raises(OSError, match="did not take it"):
        storage.store(NAME, BLOCK)
    Store.status = 0
    storage.store(NAME, BLOCK)
    Store.status = -900
    with pytest.raises(OSError, match="does not answer"):
        storage.load(NAME, SHAPES)


@pytest.mark.parametrize(
    ("extra", "status", "message"),
    [
        ({"protocol": 7}, 0, "protocol=7"),
        ({"global_segment_size": "1GB"}, 0, "global_segment_size='1GB'"),
        ({}, -1, "master"),
    ],
)
def test_wrong_settings_and_a_missing_master_are_named(extra, status, message):
    Store.status = status
    with pytest.raises(ConfigError, match=message):
        blocks(**extra)
