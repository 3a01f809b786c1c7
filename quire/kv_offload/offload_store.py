"""OffloadStore: blocks in host memory, in files of a directory, or in both; moved by its own threads. A `BlockStore`.

Without host memory one thread writes what is stored straight to the disk. With it blocks are copied there, which frees
them at once, and another thread writes them behind. Loads take what is in host memory from there. Each thread has one
buffer of the size of a block, which, with the host memory, is all the memory in flight. A disk may do what it likes: an
error, damage or a disk that does not answer ends jobs as failed, is counted, and the blocks are computed again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any, NamedTuple

import numpy as np

from quire.core.stats import OffloadStats
from quire.kv_offload.block_files import BlockFiles
from quire.kv_offload.counts import OffloadCounts
from quire.kv_offload.faults import BlockFault, FaultKind
from quire.kv_offload.host_blocks import HostBlocks
from quire.kv_offload.job import Job, JobState
from quire.kv_offload.lane import Lane, Note
from quire.kv_offload.readahead import Readahead
from quire.kv_offload.store import BlockMemory, BlockStore, FinishedJobs, Found, Place
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
JOIN_S = 0.1
"""Between two looks whether the disk still answers, while the end waits for it."""
NUM_LOADERS = 2
MAX_PREFETCHING = 1024
"""Blocks that may wait to be prefetched; more are not."""
PREFETCH_SHARE = 0.25
"""Of the host memory, what one request may have prefetched."""
STORE_NICENESS = 10
"""Of threads that write: steps go first."""
NOTHING = FinishedJobs()


class _Behind(NamedTuple):
    """A block in host memory that is to be written: bytes that are never changed."""

    key: bytes
    payload: np.ndarray
    used_at_ns: int


class OffloadStore(BlockStore):
    """Host memory over a disk; either may be missing.

    Args:
        counts: shared with `files`.
        max_behind_bytes: of blocks in host memory that wait to be written; more are not.
        hang_s, pause_s, rescan_s: as the constants above.
    """

    def __init__(
        self,
        files: BlockFiles | None,
        host: HostBlocks | None,
        counts: OffloadCounts,
        *,
        max_behind_bytes: int = 0,
        clock: Callable[[], float] = time.monotonic,
        hang_s: float = HANG_S,
        pause_s: float = PAUSE_S,
        rescan_s: float = RESCAN_S,
    ) -> None:
        self._files, self._host, self._counts, self._clock = files, host, counts, clock
        self._hang_s, self._pause_s, self._rescan_s = hang_s, pause_s, rescan_s
        self._max_behind_bytes, self._behind_bytes, self._behind_lock = max_behind_bytes, 0, threading.Lock()
        self._paused_until = -float("inf")
        self._live: dict[int, Job] = {}
        self._load_times: list[tuple[int, float]] = []
        self._closing, self._scanned = threading.Event(), threading.Event()
        self._memory: BlockMemory | None = None
        self._to_store: SimpleQueue[Job | None] = SimpleQueue()
        self._to_load: SimpleQueue[Job | None] = SimpleQueue()
        self._to_write: SimpleQueue[_Behind | None] = SimpleQueue()
        self._to_prefetch: SimpleQueue[bytes | None] = SimpleQueue()
        self._readahead = Readahead()
        self._lanes, self._disk_lanes = self._make_lanes()

    def _make_lanes(self) -> tuple[list[Lane[Any]], list[Lane[Any]]]:
        """All threads, and those that wait for the disk."""
        clock = self._clock
        store = self._store if self._host is None else self._keep
        niceness = STORE_NICENESS if self._host is None else 0  # with host memory it loads from there, too
        storing = Lane("kv-store", self._to_store, store, self._fail, clock, niceness=niceness)
        if self._files is None:
            return [storing], []
        disk: list[Lane[Any]] = [
            Lane(f"kv-load-{number}", self._to_load, self._load, self._fail, clock) for number in range(NUM_LOADERS)
        ]
        prefetch = self._prefetch
        disk.append(Lane("kv-prefetch", self._to_prefetch, prefetch, _forget, clock, niceness=STORE_NICENESS))
        if self._host is None:
            return [storing, *disk], [storing, *disk]
        write = self._write_behind
        disk.append(Lane("kv-write", self._to_write, write, self._drop_behind, clock, niceness=STORE_NICENESS))
        return [storing, *disk], disk

    # --- called by the thread that runs the steps ---

    def start(self, memory: BlockMemory) -> None:
        """As `BlockStore`; waits until what the directory holds is known, unless the disk does not answer."""
        assert self._memory is None, "a store is started once"
        self._memory = memory
        for lane in self._lanes:
            lane.start()
        if self._files is None:
            return
        threading.Thread(target=self._watch, args=(self._files,), name="kv-scan", daemon=True).start()
        if not self._scanned.wait(FIRST_SCAN_S):
            logger.warning("kv_disk has not been read within %g s", FIRST_SCAN_S)

    @property
    def is_hung(self) -> bool:
        """As `BlockStore`."""
        now = self._clock()
        return any(lane.busy_s(now) > self._hang_s for lane in self._disk_lanes)

    def lookup(self, keys: Sequence[bytes], first: int = 0) -> Found:
        """As `BlockStore`; of the disk nothing while it does not answer."""
        host, files = self._host, None if self.is_hung else self._files
        if host is None:
            num_blocks = 0 if files is None else files.num_leading(keys, first)
            return Found(num_blocks, num_blocks)
        end, num_on_disk = first, 0
        while end < len(keys):
            if keys[end] not in host:
                if files is None or keys[end] not in files:
                    break
                num_on_disk += 1
            end += 1
        return Found(end - first, num_on_disk)

    def places(self, keys: Sequence[bytes]) -> np.ndarray:
        """As `BlockStore`; of the disk nothing while it does not answer."""
        found = np.zeros(len(keys), np.uint8)
        if self._files is not None and not self.is_hung:
            found[self._files.holds(keys)] = Place.DISK
        if self._host is not None:
            found[[key in self._host for key in keys]] = Place.HOST
        return found

    def is_of_others(self, key: bytes) -> bool:
        """As `BlockStore`."""
        return self._files is not None and self._files.is_of_others(key)

    def touch(self, keys: Sequence[bytes]) -> None:
        """As `BlockStore`; the first block is the last to go, as the others are of no use without it."""
        if self._files is not None:
            self._readahead.learn(keys)
        self._touch(keys)

    def _touch(self, keys: Sequence[bytes]) -> None:
        for part in (self._host, self._files):
            if part is not None:
                part.touch(keys)

    def submit_store(self, job_id: int, keys: Sequence[bytes], block_ids: Sequence[int]) -> None:
        """As `BlockStore`."""
        if job_id in self._live:
            return
        job = self._live[job_id] = Job(job_id, keys, block_ids, self._clock(), is_store=True)
        if self._host is None and self._is_disk_off():
            self.count_dropped(len(keys))
            job.give_up()
        else:
            self._to_store.put(job)

    @property
    def copies_at_once(self) -> bool:
        """As `BlockStore`: where there is host memory."""
        return self._host is not None

    def copy_now(self, keys: Sequence[bytes], block_ids: Sequence[int]) -> None:
        """As `BlockStore`."""
        assert self._host is not None, "there is host memory to keep blocks in"
        memory, used_at_ns = self._ready_memory(), time.time_ns()
        for number, (key, block_id) in enumerate(zip(keys, block_ids, strict=True)):
            if key not in self._host:
                payload = np.empty(memory.num_bytes_of(block_id), np.uint8)
                memory.read_into(block_id, payload)
                self._counts.add(num_evicted_from_host=self._host.put(key, payload))
                self._write_later(_Behind(key, payload, used_at_ns - 1000 * number))

    def _is_disk_off(self) -> bool:
        return self.is_hung or self._clock() < self._paused_until

    def submit_load(
        self, job_id: int, keys: Sequence[bytes], block_ids: Sequence[int], time_limit_s: float | None = None
    ) -> None:
        """As `BlockStore`."""
        if job_id in self._live:
            return
        now = self._clock()
        deadline = float("inf") if time_limit_s is None else now + time_limit_s
        host, size_of = self._host, self._ready_memory().num_bytes_of
        on_disk = sum(size_of(one) for key, one in zip(keys, block_ids, strict=True) if host is None or key not in host)
        self._live[job_id] = job = Job(job_id, keys, block_ids, now, deadline, is_store=False, bytes_on_disk=on_disk)
        if not on_disk:
            self._to_store.put(job)
        for _ in range(NUM_LOADERS if on_disk else 0):
            self._to_load.put(job)

    def prefetch(self, keys: Sequence[bytes]) -> None:
        """As `BlockStore`; without host memory the system is asked to read the files."""
        files = self._files
        if files is None or self._is_disk_off():
            return
        most = MAX_PREFETCHING - self._to_prefetch.qsize()
        if self._host is not None and self._memory is not None:
            most = min(most, int(self._host.budget * PREFETCH_SHARE) // self._memory.num_block_bytes)
        for key in keys[: max(0, most)]:
            self._to_prefetch.put(key)

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
            waits_for_disk = self._host is None if job.is_store else job.bytes_on_disk > 0
            if is_hung and waits_for_disk and job.give_up():
                self._counts.add_fault(FaultKind.HUNG)
            elif now > job.deadline and job.give_up():
                self._counts.add_fault(FaultKind.SLOW)

    def _note_time(self, job: Job) -> None:
        if job.state is JobState.DONE:
            seconds = job.ended_at - job.begun_at
            if job.is_store:
                self._counts.add(store_s=seconds)
            else:
                self._counts.add(load_s=seconds)
            if job.bytes_on_disk:
                self._load_times.append((job.bytes_on_disk, seconds))
            if not job.is_store and self._files is not None:
                self.prefetch(self._readahead.propose(job.keys, lambda key: self.places([key])[0] != Place.DISK))

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

    def count_kept_out(self) -> None:
        """As `BlockStore`."""
        self._counts.add(num_kept_out=1)

    def take_load_times(self) -> list[tuple[int, float]]:
        """As `BlockStore`."""
        times, self._load_times = self._load_times, []
        return times

    def take_stats(self) -> OffloadStats | None:
        """As `BlockStore`."""
        return self._counts.take()

    def totals(self) -> OffloadStats:
        """As `BlockStore`."""
        return self._counts.totals()

    def close(self, seconds: float = 0.0) -> None:
        """As `BlockStore`."""
        self._closing.set()
        end = self._clock() + seconds
        for _ in range(NUM_LOADERS):
            self._to_load.put(None)
        self._to_store.put(None)
        self._to_prefetch.put(None)
        for lane in self._lanes:
            if lane is self._lanes[-1]:
                self._to_write.put(None)  # behind what the lanes before it have left to be written
            while lane.is_alive and not self.is_hung and (left := end - self._clock()) > 0:
                lane.join(min(left, JOIN_S))
        if seconds and any(lane.is_alive for lane in self._lanes):
            logger.warning("kv_disk: the engine ends before all blocks are stored; what is missing is computed again")

    # --- the threads ---

    def _store(self, job: Job, note: Note) -> None:
        """Write the blocks of the cache to the disk."""
        files, buffer, used_at_ns = self._ready_files(), self._buffer(), time.time_ns()
        while (number := job.take()) is not None:
            note()
            key, payload = job.keys[number], self._part_of(buffer, job, number)
            if key not in files:
                if not job.copy(self._ready_memory().read_into, number, payload):
                    return
                try:
                    files.write(key, payload, used_at_ns - 1000 * number)
                except OSError as error:
                    self._end_by_fault(job, number, error)
                    return
            self._note_block(job)

    def _keep(self, job: Job, note: Note) -> None:
        """Copy the blocks of the cache to host memory, or back."""
        assert self._host is not None, "there is host memory to keep blocks in"
        used_at_ns = time.time_ns()
        for number, key in enumerate(job.keys):
            payload = self._host.get(key)
            if not job.is_store:
                if payload is None:  # it was dropped meanwhile
                    self._counts.add_fault(FaultKind.MISSING)
                    self._fail(job)
                    return
                if not job.copy(self._ready_memory().write_from, number, payload):
                    return
                self._counts.add(num_loaded=1, loaded_bytes=len(payload))
            elif payload is None:
                payload = np.empty(self._ready_memory().num_bytes_of(job.block_ids[number]), np.uint8)
                if not job.copy(self._ready_memory().read_into, number, payload):
                    return
                self._counts.add(num_evicted_from_host=self._host.put(key, payload))
                self._write_later(_Behind(key, payload, used_at_ns - 1000 * number))
            self._note_block(job)

    def _write_later(self, behind: _Behind) -> None:
        if self._files is None or behind.key in self._files:
            return
        if self._is_disk_off() or self._behind_bytes + len(behind.payload) > self._max_behind_bytes:
            self.count_dropped(1)
            return
        self._add_behind(len(behind.payload))
        self._to_write.put(behind)

    def _write_behind(self, behind: _Behind, note: Note) -> None:
        """Write a block of the host memory to the disk."""
        files = self._ready_files()
        note()
        try:
            if self._clock() < self._paused_until:
                self.count_dropped(1)
            elif behind.key not in files:
                files.write(*behind)
        except OSError as error:
            files.note_fault(behind.key, error)
            self._paused_until = self._clock() + self._pause_s
        self._drop_behind(behind)

    def _drop_behind(self, behind: _Behind) -> None:
        self._add_behind(-len(behind.payload))

    def _add_behind(self, num_bytes: int) -> None:
        with self._behind_lock:
            self._behind_bytes += num_bytes

    def _load(self, job: Job, note: Note) -> None:
        """Read blocks from the disk, or take them from host memory, to the cache."""
        files, buffer, used_at_ns = self._ready_files(), self._buffer(), time.time_ns()
        while (number := job.take()) is not None:
            note()
            key = job.keys[number]
            payload = None if self._host is None else self._host.get(key)
            if payload is None:
                payload = self._part_of(buffer, job, number)
                try:
                    files.read(key, payload, used_at_ns - 1000 * number)
                except (OSError, BlockFault) as error:
                    self._end_by_fault(job, number, error)
                    return
                if self._host is not None:
                    self._counts.add(num_evicted_from_host=self._host.put(key, payload.copy()))
            if not job.copy(self._ready_memory().write_from, number, payload):
                return
            self._counts.add(num_loaded=1, loaded_bytes=len(payload))
            self._note_block(job)

    def _prefetch(self, key: bytes, note: Note) -> None:
        """Read a block from the disk to host memory, or let the system read it."""
        files, host = self._ready_files(), self._host
        if self._closing.is_set() or (host is not None and key in host):
            return
        note()
        try:
            if host is None:
                files.expect(key)
            else:
                payload = files.read_whole(key, self._ready_memory().num_block_bytes)
                self._counts.add(num_evicted_from_host=host.put(key, payload))
            self._counts.add(num_prefetched=1)
        except (OSError, BlockFault) as error:
            files.note_fault(key, error)
            files.forget([key])

    def _note_block(self, job: Job) -> None:
        if job.note_block(self._clock()):
            self._touch(job.keys)

    def _end_by_fault(self, job: Job, number: int, error: OSError | BlockFault) -> None:
        """A block could not be read or written: its job has failed.

        Of a load, the blocks from there on are not offered again: they are computed, and stored anew.
        """
        files = self._ready_files()
        files.note_fault(job.keys[number], error)
        if job.is_store:
            self._paused_until = self._clock() + self._pause_s
        else:
            files.forget(job.keys[number:])
        self._fail(job)

    def _fail(self, job: Job) -> None:
        job.give_up()

    def _watch(self, files: BlockFiles) -> None:
        while True:
            files.refresh()
            self._scanned.set()
            if self._closing.wait(self._rescan_s):
                return

    def _buffer(self) -> np.ndarray:
        return np.empty(self._ready_memory().num_block_bytes, dtype=np.uint8)

    def _part_of(self, buffer: np.ndarray, job: Job, number: int) -> np.ndarray:
        """As much of a buffer as block `number` of a job has bytes."""
        return buffer[: self._ready_memory().num_bytes_of(job.block_ids[number])]

    def _ready_memory(self) -> BlockMemory:
        assert self._memory is not None, "a store is started before its first job"
        return self._memory

    def _ready_files(self) -> BlockFiles:
        assert self._files is not None, "what is on a disk has one"
        return self._files


def _forget(key: bytes) -> None:
    """No request waits for a block that was to be prefetched."""
