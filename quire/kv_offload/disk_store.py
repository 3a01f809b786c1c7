"""DiskStore: blocks in files of a directory, moved by threads of its own. A `BlockStore`.

One thread stores, some load, one looks for what other servers have put there. Each has one buffer of the size of a
block, which is all the memory that is in flight. A disk may do what it likes: an error, damage or a disk that does not
answer ends jobs as failed, is counted, and the blocks are computed again. No step waits for it.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue

import numpy as np

from quire.kv_offload.block_file import HEADER, read_block_file, write_block_file
from quire.kv_offload.counts import OffloadCounts, OffloadTotals
from quire.kv_offload.directory import BlockDirectory
from quire.kv_offload.disk_index import DiskIndex
from quire.kv_offload.faults import BlockFault, FaultKind, kind_of
from quire.kv_offload.job import Job, JobState
from quire.kv_offload.lane import Lane
from quire.kv_offload.store import BlockMemory, BlockStore, FinishedJobs
from quire.logger import get_logger

logger = get_logger(__name__)

HANG_S = 2.0
"""Seconds at one block after which the disk is taken to hang, and is not used until it answers."""
PAUSE_S = 5.0
"""Seconds for which nothing is stored after that has failed."""
RESCAN_S = 2.0
"""Seconds between looks for files of other servers."""
FIRST_SCAN_S = 10.0
"""Most seconds that a start waits for the first look."""
NUM_LOADERS = 2
NOTHING = FinishedJobs()


class DiskStore(BlockStore):
    """The files of one namespace of a directory.

    Args:
        hang_s, pause_s, rescan_s: as the constants above.
    """

    def __init__(
        self,
        directory: BlockDirectory,
        index: DiskIndex,
        *,
        clock: Callable[[], float] = time.monotonic,
        hang_s: float = HANG_S,
        pause_s: float = PAUSE_S,
        rescan_s: float = RESCAN_S,
    ) -> None:
        self._directory, self._index, self._clock = directory, index, clock
        self._counts = OffloadCounts()
        self._hang_s, self._pause_s, self._rescan_s = hang_s, pause_s, rescan_s
        self._paused_until = -float("inf")
        self._live: dict[int, Job] = {}
        self._load_times: list[tuple[int, float]] = []
        self._ended = threading.Event()
        self._closing, self._scanned = threading.Event(), threading.Event()
        self._memory: BlockMemory | None = None
        self._to_store: SimpleQueue[Job | None] = SimpleQueue()
        self._to_load: SimpleQueue[Job | None] = SimpleQueue()
        loaders = [Lane(f"kv-disk-load-{n}", self._to_load, self._load, self._fail, clock) for n in range(NUM_LOADERS)]
        self._lanes = [Lane("kv-disk-store", self._to_store, self._store, self._fail, clock), *loaders]

    # --- called by the thread that runs the steps ---

    def start(self, memory: BlockMemory) -> None:
        """As `BlockStore`; waits until what the directory holds is known, unless the disk does not answer."""
        assert self._memory is None, "a store is started once"
        self._memory = memory
        for lane in self._lanes:
            lane.start()
        threading.Thread(target=self._watch_directory, name="kv-disk-scan", daemon=True).start()
        if not self._scanned.wait(FIRST_SCAN_S):
            logger.warning("kv_disk: %s has not been read within %g s", self._directory.root, FIRST_SCAN_S)

    @property
    def is_hung(self) -> bool:
        """Whether the disk does not answer."""
        now = self._clock()
        return any(lane.busy_s(now) > self._hang_s for lane in self._lanes)

    def lookup(self, keys: Sequence[bytes], first: int = 0) -> int:
        """As `BlockStore`; none while the disk does not answer."""
        return 0 if self.is_hung else self._index.num_leading(self._directory.prefix, keys, first)

    def touch(self, keys: Sequence[bytes]) -> None:
        """As `BlockStore`; the first block is the last to go, as the others are of no use without it."""
        self._index.touch(self._directory.prefix + key for key in reversed(keys))

    def submit_store(self, job_id: int, keys: Sequence[bytes], block_ids: Sequence[int]) -> None:
        """As `BlockStore`."""
        if job_id in self._live:
            return
        now = self._clock()
        job = self._live[job_id] = Job(job_id, keys, block_ids, now, is_store=True)
        if self.is_hung or now < self._paused_until:
            self.count_dropped(len(keys))
            job.give_up()
        else:
            self._to_store.put(job)

    def submit_load(
        self, job_id: int, keys: Sequence[bytes], block_ids: Sequence[int], time_limit_s: float | None = None
    ) -> None:
        """As `BlockStore`."""
        if job_id in self._live:
            return
        now = self._clock()
        deadline = float("inf") if time_limit_s is None else now + time_limit_s
        self._live[job_id] = job = Job(job_id, keys, block_ids, now, deadline, is_store=False)
        for _ in range(NUM_LOADERS):
            self._to_load.put(job)

    def get_finished(self) -> FinishedJobs:
        """As `BlockStore`."""
        if not self._live:
            return NOTHING
        self._give_up_late()
        over = [job for job in self._live.values() if job.is_over]
        for job in over:
            del self._live[job.job_id]
            self._note_time(job)
        done = tuple(job.job_id for job in over if job.state is JobState.DONE)
        return FinishedJobs(done, tuple(job.job_id for job in over if job.state is JobState.FAILED))

    def _give_up_late(self) -> None:
        now, is_hung = self._clock(), self.is_hung
        for job in self._live.values():
            if is_hung and job.give_up():
                self._counts.add_fault(FaultKind.HUNG)
            elif now > job.deadline and job.give_up():
                self._counts.add_fault(FaultKind.SLOW)

    def _note_time(self, job: Job) -> None:
        if job.state is JobState.DONE:
            seconds = job.ended_at - job.begun_at
            self._counts.add_seconds("store_s" if job.is_store else "load_s", seconds)
            if not job.is_store:
                self._load_times.append((len(job.keys), seconds))

    def give_up_stores(self) -> None:
        """As `BlockStore`."""
        for job in self._live.values():
            if job.is_store and job.give_up():
                self.count_dropped(len(job.keys))

    @property
    def num_storing(self) -> int:
        """As `BlockStore`."""
        return sum(len(job.keys) for job in self._live.values() if job.is_store)

    def count_dropped(self, num_blocks: int) -> None:
        """As `BlockStore`."""
        self._counts.add(num_dropped=num_blocks)

    def count_lookup(self, num_queries: int, num_hits: int) -> None:
        """As `BlockStore`."""
        self._counts.add(num_queries=num_queries, num_hits=num_hits)

    def count_kept_out(self) -> None:
        """As `BlockStore`."""
        self._counts.add(num_kept_out=1)

    def take_load_times(self) -> list[tuple[int, float]]:
        """As `BlockStore`."""
        times, self._load_times = self._load_times, []
        return times

    def totals(self) -> OffloadTotals:
        """As `BlockStore`."""
        return self._counts.totals()

    def wait(self, seconds: float) -> None:
        """As `BlockStore`."""
        self._ended.wait(seconds)
        self._ended.clear()

    def close(self, seconds: float = 0.0) -> None:
        """As `BlockStore`."""
        self._closing.set()
        self._to_store.put(None)
        for _ in range(NUM_LOADERS):
            self._to_load.put(None)
        end = self._clock() + seconds
        for lane in self._lanes:
            lane.join(max(0.0, end - self._clock()))

    # --- the threads ---

    def _store(self, job: Job, note: Callable[[], None]) -> None:
        payload, used_at_ns = self._buffer(), time.time_ns()
        while (number := job.take()) is not None:
            note()
            key = job.keys[number]
            if self._directory.prefix + key not in self._index:
                if not job.copy(self._ready_memory().read_into, number, payload):
                    return
                try:
                    self._write(key, payload, used_at_ns - 1000 * number)
                except OSError as error:
                    self._end_by_fault(job, number, error)
                    return
            if job.note_block(self._clock()):
                self.touch(job.keys)
                self._ended.set()

    def _write(self, key: bytes, payload: np.ndarray, used_at_ns: int) -> None:
        name, size = self._directory.prefix + key, HEADER.size + len(payload)
        if not self._index.fits(size):
            self.count_dropped(1)
            return
        path = self._directory.path_of(name)
        try:
            write_block_file(path, self._directory.namespace, key, payload, used_at_ns)
        except FileNotFoundError:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_block_file(path, self._directory.namespace, key, payload, used_at_ns)
        self._counts.add(num_stored=1, stored_bytes=len(payload))
        self._remove_evicted(self._index.add(name, size))

    def _remove_evicted(self, names: Sequence[bytes]) -> None:
        for name in names:
            self._directory.remove(name)
        if names:
            self._counts.add(num_evicted=len(names))

    def _load(self, job: Job, note: Callable[[], None]) -> None:
        payload, used_at_ns = self._buffer(), time.time_ns()
        while (number := job.take()) is not None:
            note()
            key = job.keys[number]
            path = self._directory.path_of(self._directory.prefix + key)
            try:
                read_block_file(path, self._directory.namespace, key, payload)
            except (OSError, BlockFault) as error:
                self._end_by_fault(job, number, error)
                return
            with contextlib.suppress(OSError):
                os.utime(path, ns=(used_at_ns - 1000 * number,) * 2)
            if not job.copy(self._ready_memory().write_from, number, payload):
                return
            self._counts.add(num_loaded=1, loaded_bytes=len(payload))
            if job.note_block(self._clock()):
                self.touch(job.keys)
                self._ended.set()

    def _end_by_fault(self, job: Job, number: int, error: OSError | BlockFault) -> None:
        """Count what went wrong with a block; its job has failed.

        Of a load, the blocks from there on are not offered again: they are computed, and stored anew.
        """
        kind, prefix = kind_of(error), self._directory.prefix
        self._counts.add_fault(kind)
        logger.warning("kv_disk: %s: %s", self._directory.path_of(prefix + job.keys[number]), error)
        if job.is_store:
            self._paused_until = self._clock() + self._pause_s
        else:
            for key in job.keys[number:]:
                self._index.remove(prefix + key)
        if kind.is_damage:
            self._directory.remove(prefix + job.keys[number])
        self._fail(job)

    def _fail(self, job: Job) -> None:
        job.give_up()
        self._ended.set()

    def _watch_directory(self) -> None:
        while True:
            try:
                scan = self._directory.scan()
            except OSError as error:
                self._counts.add_fault(kind_of(error))
            else:
                for name in scan.gone:
                    self._index.remove(name)
                for one in scan.found:
                    self._remove_evicted(self._index.add(one.name, one.size))
            self._scanned.set()
            if self._closing.wait(self._rescan_s):
                return

    def _buffer(self) -> np.ndarray:
        return np.empty(self._ready_memory().num_block_bytes, dtype=np.uint8)

    def _ready_memory(self) -> BlockMemory:
        assert self._memory is not None, "a store is started before its first job"
        return self._memory
