"""Blocks that are read before they are asked for: where that helps they are there, elsewhere hardly any is read."""

from __future__ import annotations

import pytest

from benchmarks.engine.bench_kv_prefetch import TRACES, replay
from quire.kv_offload.readahead import MAX_LEARNED, Readahead
from tests.unit.kv_offload.fakes import BLOCK_BYTES, ArrayMemory, key, load_blocks, make_store, store_blocks, wait_until

KEYS = [key(number) for number in range(8)]


def test_reading_ahead_helps_who_reads_on_and_costs_others_less_than_a_hundredth():
    shares = {}
    for name, make in TRACES.items():
        without, ahead = (replay(make(), is_reading_ahead=one) for one in (False, True))
        assert ahead.num_loaded == without.num_loaded
        shares[name] = (without.num_from_host / without.num_loaded, ahead.num_from_host / ahead.num_loaded)
        if name != "documents":
            assert ahead.wasted_share < 0.01, name
            assert shares[name][1] > shares[name][0] - 0.01, name
    assert shares["documents"][1] > shares["documents"][0] + 0.3


def test_what_is_remembered_is_bounded():
    readahead = Readahead()
    readahead.learn([b"%d" % number for number in range(MAX_LEARNED + 100)])
    assert len(readahead._next) == MAX_LEARNED
    assert readahead.propose([b"5"], lambda key: False) == []
    assert readahead.propose([b"%d" % MAX_LEARNED], lambda key: False)[:1] == [b"%d" % (MAX_LEARNED + 1)]


@pytest.fixture
def filled(tmp_path):
    """A directory with six blocks."""
    memory = ArrayMemory()
    store = make_store(tmp_path)
    store.start(memory)
    store_blocks(store, memory, list(range(6)))
    store.close(10.0)
    return tmp_path


def test_prefetched_blocks_are_loaded_from_host_memory(filled):
    store, memory = make_store(filled, host_bytes=40 * BLOCK_BYTES), ArrayMemory()
    store.start(memory)
    store.prefetch([*KEYS[:6], KEYS[7]])
    wait_until(lambda: store.totals().num_prefetched == 6 and store.lookup(KEYS) == (6, 0))
    assert store.totals().faults == {"missing": 1} and load_blocks(store, list(range(6))).done == (1,)
    assert not store.take_load_times(), "nothing came from the disk"
    store.close(10.0)


def test_after_a_load_the_blocks_that_followed_are_read_ahead(filled):
    store, memory = make_store(filled, host_bytes=40 * BLOCK_BYTES), ArrayMemory()
    store.start(memory)
    store.touch(KEYS[:6])
    assert load_blocks(store, [0, 1]).done == (1,)
    wait_until(lambda: store.lookup(KEYS) == (6, 0))
    assert store.totals().num_prefetched == 4
    store.close(10.0)


def test_without_host_memory_the_system_is_asked_to_read(filled):
    store = make_store(filled)
    store.start(ArrayMemory())
    store.prefetch(KEYS[:3])
    wait_until(lambda: store.totals().num_prefetched == 3)
    store.close(10.0)
