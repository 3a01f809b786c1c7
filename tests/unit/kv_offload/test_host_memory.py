"""Host memory before a disk, or alone: blocks are free at once, written behind, and loaded without the disk."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from quire.kv_offload import block_files
from quire.kv_offload.faults import FaultKind
from tests.unit.kv_offload.fakes import (
    BLOCK_BYTES,
    ArrayMemory,
    content,
    key,
    load_blocks,
    make_store,
    num_found,
    store_blocks,
    wait_until,
)

KEYS = [key(number) for number in range(6)]


@pytest.fixture
def memory() -> ArrayMemory:
    return ArrayMemory()


@pytest.fixture
def start(memory):
    started = []

    def make(path=None, **settings):
        started.append(make_store(path, **settings))
        started[-1].start(memory)
        return started[-1]

    yield make
    for store in started:
        store.close(10.0)


def test_host_memory_alone_gives_back_what_it_keeps_and_drops_the_least_recently_used(start, memory):
    store = start(host_bytes=4 * BLOCK_BYTES)
    store_blocks(store, memory, [0, 1, 2])
    assert store.lookup(KEYS) == (3, 0)
    assert load_blocks(store, [0, 1, 2]).done == (1,)
    assert (memory.blocks[8:11] == np.stack([content(number) for number in range(3)])).all()
    store_blocks(store, memory, [3, 4], job_id=2)
    assert [num_found(store, [one]) for one in KEYS] == [1, 1, 0, 1, 1, 0]
    assert store.totals().num_evicted_from_host == 1 and not store.totals().num_stored


def test_a_block_that_was_dropped_meanwhile_fails_its_load(start, memory):
    store = start(host_bytes=2 * BLOCK_BYTES)
    store_blocks(store, memory, [0, 1])
    store._host.get = lambda key: None
    assert load_blocks(store, [0, 1]).failed == (1,)
    assert store.totals().faults == {FaultKind.MISSING.value: 1}


def test_what_is_kept_is_written_behind_and_found_on_the_disk_by_the_next_process(start, memory, tmp_path):
    settings = {"host_bytes": 2 * BLOCK_BYTES, "max_behind_bytes": 10 * BLOCK_BYTES}
    store = start(tmp_path, **settings)
    store_blocks(store, memory, [0, 1, 2, 3])
    store.close(10.0)
    assert store.lookup(KEYS) == (4, 2)
    again = start(tmp_path, **settings)
    assert again.lookup(KEYS) == (4, 4)
    assert load_blocks(again, [0, 1, 2, 3]).done == (1,)
    assert (memory.blocks[8:12] == np.stack([content(number) for number in range(4)])).all()
    assert again.lookup(KEYS).num_on_disk == 2, "what was loaded stays in host memory"


def test_a_disk_that_hangs_costs_host_memory_nothing_and_only_so_much_waits_for_it(
    start, memory, tmp_path, monkeypatch
):
    answer, write = threading.Event(), block_files.write_block_file

    def hang(*args: object) -> None:
        answer.wait(60)
        write(*args)

    monkeypatch.setattr(block_files, "write_block_file", hang)
    store = start(tmp_path, host_bytes=10 * BLOCK_BYTES, max_behind_bytes=2 * BLOCK_BYTES, hang_s=0.05)
    assert store_blocks(store, memory, [0, 1, 2, 3]).done == (0,)
    assert store.totals().num_dropped == 2
    wait_until(lambda: store.is_hung)
    assert load_blocks(store, [0, 1, 2, 3]).done == (1,)
    answer.set()
    wait_until(lambda: not store.is_hung and store.totals().num_stored == 2)
