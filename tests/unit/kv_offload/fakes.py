"""What the tests of stores use: a cache that is an array, names, and a wait that ends when a store has reported."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from quire.kv_offload.block_files import BlockFiles
from quire.kv_offload.counts import OffloadCounts
from quire.kv_offload.directory import BlockDirectory
from quire.kv_offload.disk_index import DiskIndex
from quire.kv_offload.host_blocks import HostBlocks
from quire.kv_offload.offload_store import OffloadStore
from quire.kv_offload.policies.lru import LRUPolicy
from quire.kv_offload.store import BlockStore, FinishedJobs

BLOCK_BYTES = 1000
NAMESPACE = hashlib.sha256(b"a model").digest()


class ArrayMemory:
    """Blocks as rows of an array."""

    num_block_bytes = BLOCK_BYTES

    def __init__(self, num_blocks: int = 16) -> None:
        self.blocks = np.zeros((num_blocks, BLOCK_BYTES), np.uint8)

    def num_bytes_of(self, block_id: int) -> int:
        return BLOCK_BYTES

    def read_into(self, block_id: int, payload: np.ndarray) -> None:
        payload[:] = self.blocks[block_id]

    def write_from(self, block_id: int, payload: np.ndarray) -> None:
        self.blocks[block_id] = payload


def key(number: int) -> bytes:
    return hashlib.sha256(number.to_bytes(4, "little")).digest()


def content(number: int) -> np.ndarray:
    """What a block of this number holds, in every test."""
    return np.random.default_rng(number).integers(0, 256, BLOCK_BYTES, np.uint8)


def make_store(
    path: Path | None, budget: int = 1 << 20, namespace: bytes = NAMESPACE, host_bytes: int = 0, **settings: Any
) -> OffloadStore:
    """A store on a directory (None = there is none) and on so much host memory."""
    counts, files = OffloadCounts(), None
    if path is not None:
        directory = BlockDirectory(path, namespace)
        directory.create({"model": "a model"})
        files = BlockFiles(directory, DiskIndex(LRUPolicy(budget)), counts)
    host = HostBlocks(LRUPolicy(host_bytes)) if host_bytes else None
    return OffloadStore(files, host, counts, **settings)


def num_found(store: BlockStore, keys: list[bytes], first: int = 0) -> int:
    return store.lookup(keys, first).num_blocks


def finished(store: BlockStore, num_jobs: int = 1) -> FinishedJobs:
    """The reports of so many jobs, once they are there."""
    done: list[int] = []
    failed: list[int] = []
    end = time.monotonic() + 60
    while len(done) + len(failed) < num_jobs:
        assert time.monotonic() < end, "a job is lost"
        time.sleep(0.001)
        report = store.get_finished()
        done += report.done
        failed += report.failed
    return FinishedJobs(tuple(done), tuple(failed))


def store_blocks(store: BlockStore, memory: ArrayMemory, numbers: list[int], job_id: int = 0) -> FinishedJobs:
    """Put the contents of these numbers into the first blocks of the cache, and store them."""
    for block_id, number in enumerate(numbers):
        memory.blocks[block_id] = content(number)
    store.submit_store(job_id, [key(number) for number in numbers], list(range(len(numbers))))
    return finished(store)


def load_blocks(store: BlockStore, numbers: list[int], job_id: int = 1, first: int = 8, **limits: Any) -> FinishedJobs:
    """Load these numbers into blocks `first`, `first + 1`, ..."""
    block_ids = list(range(first, first + len(numbers)))
    store.submit_load(job_id, [key(number) for number in numbers], block_ids, **limits)
    return finished(store)


def wait_until(is_true: Callable[[], bool]) -> None:
    """The threads of a store get there."""
    event = threading.Event()
    for _ in range(6000):
        if is_true():
            return
        event.wait(0.01)
    raise AssertionError("never")
