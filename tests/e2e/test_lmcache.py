"""LMCacheMPConnector over a fake of LMCache's adapters: the same bytes, no chunk left locked, no request lost.

`make test-lmcache` does this with LMCache and its server.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import pytest

from quire.config.kv_transfer import KVTransferConfig
from quire.errors import ConfigError
from quire.kv_transfer.conformance import check_connector
from quire.kv_transfer.connector import KVConnectorRole
from quire.kv_transfer.lmcache import ADAPTERS, LMCacheConnector
from tests.e2e.test_connector import BLOCK_SIZE, NUM_PROMPT_TOKENS, Core
from tests.unit.kv_transfer.fake_lmcache import CHUNK_SIZE, FakeServer
from tests.unit.kv_transfer.test_layout import LAYOUT

NUM_LOADED = NUM_PROMPT_TOKENS // CHUNK_SIZE * CHUNK_SIZE


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> FakeServer:
    server = FakeServer()
    monkeypatch.setitem(sys.modules, ADAPTERS, server.module())
    return server


def config(**extra: Any) -> dict[str, Any]:
    extra = {f"lmcache.mp.{name}": value for name, value in {"mq_timeout": 0.05, **extra}.items()}
    return {"kv_connector": "LMCacheMPConnector", "kv_connector_extra_config": extra}


def test_it_keeps_the_contract_of_connectors_and_unlocks_what_it_locked(server):
    assert check_connector(KVTransferConfig(**config())) == {}
    assert server.kept and not any(server.locks.values())


def test_an_engine_loads_what_it_computed_and_gives_the_same_bytes(server):
    plain, core = Core(), Core(kv_transfer_config=config())
    tokens, logprobs, num_computed = plain.answer(0)
    assert core.answer(0) == (tokens, logprobs, num_computed)
    assert core.answer(1) == (tokens, logprobs, num_computed - NUM_LOADED)
    assert core.answer(2, cache_salt="another tenant")[2] == num_computed, "a salt keeps tenants apart"
    other = Core(kv_transfer_config=config())
    assert other.answer(0) == (tokens, logprobs, num_computed - NUM_LOADED), "ids of requests are those of an engine"
    for key, chunk in server.kept.items():
        server.kept[key] = chunk.flip(0)  # the blocks of a chunk in each other's place
    assert core.answer(3) == (tokens, logprobs, num_computed), "no block is taken for another"
    server.is_answering = False
    assert core.answer(4) == (tokens, logprobs, num_computed)
    server.is_up = False
    assert core.answer(5) == (tokens, logprobs, num_computed)
    assert core.counts["failed_blocks"] and core.counts["unsaved_blocks"] and core.counts["lmcache_damaged_blocks"]
    for one in (plain, core, other):
        one.core.shutdown()
        one.core.shutdown()
    assert not any(server.locks.values()) and len(server.ended) >= 5


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"port": "5555"}, "lmcache.mp.port cannot be '5555'"),
        ({"mq_timeout": 0}, "lmcache.mp.mq_timeout cannot be 0"),
        ({"mp_transfer_mode": "driven"}, "lmcache.mp.mp_transfer_mode cannot be"),
        ({"lazy_offload": True}, "has no key 'lmcache.mp.lazy_offload'"),
    ],
)
def test_wrong_settings_are_refused(server, extra, message):
    with pytest.raises(ConfigError, match=message):
        Core(kv_transfer_config=config(**extra))


def test_it_says_what_is_missing(server, monkeypatch):
    with pytest.raises(ConfigError, match=f"must be a multiple of {3 * BLOCK_SIZE}"):
        layout = dataclasses.replace(LAYOUT, block_size=3 * BLOCK_SIZE)
        LMCacheConnector(KVTransferConfig(**config()), KVConnectorRole.SCHEDULER, layout)
    server.is_up = False
    with pytest.raises(ConfigError, match="tcp://localhost:5555 does not answer"):
        LMCacheConnector(KVTransferConfig(**config()), KVConnectorRole.WORKER, LAYOUT)
    monkeypatch.setitem(sys.modules, ADAPTERS, None)
    with pytest.raises(ConfigError, match="LMCache cannot be imported"):
        LMCacheConnector(KVTransferConfig(**config()), KVConnectorRole.WORKER, LAYOUT)
    with pytest.raises(ConfigError, match="keeps LMCache inside the engine") as refused:
        Core(kv_transfer_config={"kv_connector": "LMCacheConnectorV1"})
    assert "LMCacheMPConnector" in str(refused.value.hint)
