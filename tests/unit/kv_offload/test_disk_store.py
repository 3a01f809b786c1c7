"""Blocks on a disk: found again after a restart and by others; whatever the disk does, jobs end and are counted."""

from __future__ import annotations

import errno
import hashlib
import os
import threading
from pathlib import Path

import pytest

from quire.errors import ConfigError
from quire.kv_offload import block_files
from quire.kv_offload.block_file import HEADER
from quire.kv_offload.directory import BlockDirectory
from quire.kv_offload.faults import FaultKind
from tests.unit.kv_offload.fakes import (
    BLOCK_BYTES,
    NAMESPACE,
    ArrayMemory,
    content,
    key,
    load_blocks,
    make_store,
    num_found,
    store_blocks,
    wait_until,
)

FILE_BYTES = HEADER.size + BLOCK_BYTES
KEYS = [key(number) for number in range(6)]


@pytest.fixture
def stores():
    """Starts stores, and ends them."""
    started = []

    def start(path: Path, memory: ArrayMemory | None = None, **settings):
        store = make_store(path, **settings)
        store.start(memory or ArrayMemory())
        started.append(store)
        return store

    yield start
    for store in started:
        store.close(10.0)


def path_of(root: Path, number: int) -> Path:
    directory = BlockDirectory(root, NAMESPACE)
    return directory.path_of(directory.prefix + key(number))


def test_stored_blocks_are_loaded_by_the_same_process_and_the_next_one(tmp_path, stores):
    memory = ArrayMemory()
    store = stores(tmp_path / "kv", memory)
    assert store_blocks(store, memory, [0, 1, 2]).done == (0,)
    assert num_found(store, KEYS) == 3 and num_found(store, KEYS, first=1) == 2 and num_found(store, KEYS[3:]) == 0
    store.close(10.0)
    again_memory = ArrayMemory()
    again = stores(tmp_path / "kv", again_memory)
    assert num_found(again, KEYS) == 3
    assert load_blocks(again, [0, 1, 2]).done == (1,)
    for number in range(3):
        assert (again_memory.blocks[8 + number] == content(number)).all()
    assert again.totals().num_loaded == 3 and again.totals().loaded_bytes == 3 * BLOCK_BYTES
    assert [size for size, _ in again.take_load_times()] == [3 * BLOCK_BYTES] and not again.take_load_times()


def test_what_is_stored_already_is_not_written_again(tmp_path, stores):
    memory = ArrayMemory()
    store = stores(tmp_path, memory)
    store_blocks(store, memory, [0, 1])
    written = path_of(tmp_path, 0).stat().st_ino
    store_blocks(store, memory, [0, 1, 2], job_id=2)
    assert store.totals().num_stored == 3 and path_of(tmp_path, 0).stat().st_ino == written


def test_another_model_finds_nothing_but_shares_the_bytes(tmp_path, stores):
    memory = ArrayMemory()
    store_blocks(stores(tmp_path, memory), memory, [0, 1, 2])
    other = stores(tmp_path, memory, namespace=hashlib.sha256(b"another").digest(), budget=4 * FILE_BYTES)
    assert num_found(other, KEYS) == 0
    store_blocks(other, memory, [0, 1], job_id=3)
    assert other.totals().num_evicted == 1 and len(list(tmp_path.rglob("*.kv"))) == 4


def test_a_neighbour_finds_what_is_stored_while_it_runs_and_misses_what_goes(tmp_path, stores):
    memory = ArrayMemory()
    first, second = stores(tmp_path, memory, rescan_s=0.01), stores(tmp_path, rescan_s=0.01)
    store_blocks(first, memory, [0, 1])
    wait_until(lambda: num_found(second, KEYS) == 2)
    assert load_blocks(second, [0, 1]).done == (1,)
    path_of(tmp_path, 1).unlink()
    wait_until(lambda: num_found(second, KEYS) == 1)


def test_the_ends_of_sequences_go_first_and_so_does_what_is_unused_after_a_restart(tmp_path, stores):
    memory = ArrayMemory()
    store = stores(tmp_path, memory, budget=4 * FILE_BYTES)
    store_blocks(store, memory, [0, 1])
    store_blocks(store, memory, [2, 3], job_id=2)
    load_blocks(store, [0, 1], job_id=3)
    store.close(10.0)
    again = stores(tmp_path, memory, budget=4 * FILE_BYTES)
    store_blocks(again, memory, [4], job_id=4)
    assert [num_found(again, [one]) for one in KEYS] == [1, 1, 1, 0, 1, 0]


def test_a_smaller_budget_removes_what_is_too_much(tmp_path, stores):
    memory = ArrayMemory()
    store_blocks(stores(tmp_path, memory), memory, [0, 1, 2, 3])
    small = stores(tmp_path, memory, budget=2 * FILE_BYTES)
    wait_until(lambda: len(list(tmp_path.rglob("*.kv"))) == 2)
    assert num_found(small, KEYS) == 2


@pytest.mark.parametrize("damage", ["bits", "cut", "swapped", "emptied", "gone", "directory"])
def test_a_damaged_block_fails_its_load_and_is_not_offered_again(tmp_path, stores, damage):
    memory = ArrayMemory()
    store = stores(tmp_path, memory)
    store_blocks(store, memory, [0, 1, 2])
    path, other = path_of(tmp_path, 1), path_of(tmp_path, 2)
    whole = path.read_bytes()
    if damage == "bits":
        path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    elif damage == "cut":
        path.write_bytes(whole[:300])
    elif damage == "swapped":
        path.write_bytes(other.read_bytes())
    elif damage == "emptied":
        path.write_bytes(b"")
    else:
        path.unlink()
        if damage == "directory":
            path.mkdir()
    memory.blocks[8:] = 255
    assert load_blocks(store, [0, 1, 2]).failed == (1,)
    assert (memory.blocks[9] == 255).all(), "a damaged block came into the cache"
    assert sum(store.totals().faults.values()) == 1
    assert num_found(store, KEYS) == 1
    if damage != "directory":
        store_blocks(store, memory, [0, 1, 2], job_id=5)
        assert load_blocks(store, [0, 1, 2], job_id=6).done == (6,)


@pytest.mark.parametrize(
    ("number", "kind"),
    [(errno.ENOSPC, FaultKind.NO_SPACE), (errno.EIO, FaultKind.IO_ERROR), (errno.EROFS, FaultKind.READ_ONLY)],
)
def test_a_disk_that_takes_nothing_ends_stores_and_is_left_alone_for_a_while(
    tmp_path, stores, monkeypatch, number, kind
):
    memory = ArrayMemory()
    store = stores(tmp_path, memory)
    store_blocks(store, memory, [0])

    def refuse(file: int, data: object) -> int:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr("quire.kv_offload.block_file.os.write", refuse)
        assert store_blocks(store, memory, [0, 1], job_id=2).failed == (2,)
    assert store.totals().faults == {kind.value: 1}
    assert store_blocks(store, memory, [0, 1], job_id=3).failed == (3,) and store.totals().num_dropped == 2
    assert load_blocks(store, [0], job_id=4).done == (4,)
    assert not list(tmp_path.rglob("*.tmp"))


def test_a_disk_that_does_not_answer_is_not_waited_for_and_may_come_back(tmp_path, stores, monkeypatch):
    memory = ArrayMemory()
    store = stores(tmp_path, memory, hang_s=0.5)
    store_blocks(store, memory, [0, 1])
    answer, read = threading.Event(), block_files.read_block_file

    def hang(*args: object) -> None:
        answer.wait(60)
        read(*args)

    monkeypatch.setattr(block_files, "read_block_file", hang)
    memory.blocks[8:] = 255
    assert load_blocks(store, [0, 1]).failed == (1,)
    assert store.totals().faults == {FaultKind.HUNG.value: 1}
    assert store.is_hung and num_found(store, KEYS) == 0
    assert store_blocks(store, memory, [2], job_id=2).failed == (2,)
    answer.set()
    wait_until(lambda: num_found(store, KEYS) == 2)
    assert (memory.blocks[8:] == 255).all(), "a load wrote to the cache after it was given up"
    assert load_blocks(store, [0, 1], job_id=3).done == (3,)


def test_a_load_that_takes_too_long_is_given_up(tmp_path, stores):
    memory = ArrayMemory()
    store = stores(tmp_path, memory)
    store_blocks(store, memory, [0])
    memory.read_into = memory.write_from = lambda block_id, payload: None  # type: ignore[method-assign]
    store.submit_load(1, [key(0)], [8], time_limit_s=-1.0)
    assert store.get_finished().failed == (1,)
    assert store.totals().faults == {FaultKind.SLOW.value: 1}


def test_stores_are_given_up_when_their_blocks_are_needed(tmp_path, stores, monkeypatch):
    begun, given_up, write = threading.Event(), threading.Event(), block_files.write_block_file

    def write_later(*args: object) -> None:
        begun.set()
        given_up.wait(60)
        write(*args)

    monkeypatch.setattr(block_files, "write_block_file", write_later)
    store = stores(tmp_path)
    store.submit_store(0, KEYS, list(range(6)))
    assert store.num_storing == 6 and begun.wait(60)
    store.give_up_stores()
    assert store.get_finished().failed == (0,) and store.num_storing == 0
    given_up.set()
    assert store.totals().num_dropped == 6
    store.close(10.0)
    assert num_found(store, KEYS) == 1, "the block that was being written is whole, and none was begun after it"


def test_what_a_killed_process_left_is_removed_in_time(tmp_path, stores):
    memory = ArrayMemory()
    store = stores(tmp_path, memory)
    store_blocks(store, memory, [0])
    store.close(10.0)
    shard = path_of(tmp_path, 0).parent
    old, new = shard / ".a.1-0.tmp", shard / ".b.1-0.tmp"
    for path in (old, new):
        path.write_bytes(b"torn")
    os.utime(old, (1, 1))
    assert num_found(stores(tmp_path), KEYS) == 1
    assert not old.exists() and new.exists()


def test_a_directory_that_others_may_write_to_is_refused(tmp_path):
    tmp_path.chmod(0o777)
    with pytest.raises(ConfigError, match="other users may write to it") as error:
        make_store(tmp_path)
    assert error.value.field == "kv_disk" and error.value.hint
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be used"):
        make_store(tmp_path / "file" / "below")
