"""RecordWriter: takes what happened from the engine's thread and writes it on its own.

Used by `RecordedScheduler`. The engine's thread does no more than append to a queue. When the writer falls behind, or
the disk fails, recording pauses: the file ends, the log says so, and the next one begins with the state by then.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np

from quire.flight_recorder import snapshot
from quire.flight_recorder.records import VERSION, Head, Record, Schedule, frame
from quire.flight_recorder.segments import SegmentRing
from quire.logger import get_logger
from quire.scheduler.setup import SchedulerSetup
from quire.version import __version__

TICK_S = 0.1
MAX_QUEUED = 50_000
RETRY_S = 10.0
ONE = np.int32(1).tobytes()

logger = get_logger(__name__)

Entry = Callable[[], Record]
"""Makes a record of what the engine's thread noted; called on the writer's thread."""


class RecordWriter:
    """Writes records to a ring of files.

    Args:
        directory: of the files.
        max_bytes: of all of them.
        setup: of the scheduler, for the heads.
        clock: what the scheduler reads, for the heads.
        max_queued: records that may wait for the thread.

    Attributes:
        wants_state: a new file should begin; at an idle moment if one comes before `needs_state`.
        needs_state: a new file must begin.

    Raises:
        ConfigError: the directory cannot be written.
    """

    def __init__(
        self,
        directory: Path,
        max_bytes: int,
        setup: SchedulerSetup,
        clock: Callable[[], float] = time.monotonic,
        max_queued: int = MAX_QUEUED,
    ) -> None:
        self._run = f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{os.getpid()}-{time.monotonic_ns() % 10**6:06d}"
        self._ring = SegmentRing(directory, max_bytes, self._run)
        self._setup = setup
        self._clock = clock
        self._max_queued = max_queued
        self._queue: deque[Entry | _Boundary] = deque()
        self._num_files = 0
        self._num_begun = 1
        self._last_rows = b""
        self._is_paused = False  # records are dropped until a state comes
        self._num_dropped = 0
        self._not_before = 0.0
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._is_closed = False
        self.wants_state = self.needs_state = False
        self._thread = threading.Thread(target=self._run_thread, name="flight recorder", daemon=True)
        self._begin(_Boundary(None, False, clock(), time.time()))
        self._thread.start()
        atexit.register(self.close)

    # --- the engine's thread ---

    def put(self, entry: Entry) -> None:
        """Record something; never waits."""
        if self._is_paused:
            self._num_dropped += 1
            return
        self._queue.append(entry)
        if len(self._queue) > self._max_queued:
            self._pause(f"{self._max_queued} records are waiting to be written")

    def begin_file(self, state: snapshot.Node) -> None:
        """Go on in a new file, which begins with this state."""
        was_paused, self._is_paused = self._is_paused, False
        self.wants_state = self.needs_state = False
        self._num_begun += 1
        self._queue.append(_Boundary(state, not was_paused, self._clock(), time.time()))
        if was_paused:
            logger.warning("flight recorder resumed; %d records are missing", self._num_dropped)
            self._num_dropped = 0

    def give_up(self, reason: str) -> None:
        """Record no more: a state could not be written down."""
        logger.error("flight recorder stopped: %s", reason)
        self.wants_state = self.needs_state = False
        self._is_paused, self._not_before = True, float("inf")

    def flush(self) -> None:
        """Write what has been put, now."""
        with self._lock:
            self._drain()

    def close(self) -> None:
        """Write everything and end the file; harmless when repeated."""
        if self._is_closed:
            return
        self._is_closed = True
        self._wake.set()
        self._thread.join(timeout=5.0)
        with self._lock:
            self._drain()
            self._ring.close()
        self._is_paused = True
        atexit.unregister(self.close)

    def _pause(self, reason: str) -> None:
        logger.warning("flight recorder paused: %s", reason)
        self._is_paused = True

    # --- the writer's thread ---

    def _run_thread(self) -> None:
        while not self._is_closed:
            self._wake.wait(TICK_S)
            with self._lock:
                self._drain()
            if self._is_paused and not self._queue and time.monotonic() >= self._not_before:
                self.needs_state = True

    def _drain(self) -> None:
        try:
            self._write_queued()
        except snapshot.SnapshotError as error:
            self.give_up(error.message)
            self._queue.clear()
        except OSError as error:
            self._pause(f"the file cannot be written: {error.strerror}")
            self._not_before = time.monotonic() + RETRY_S
            self._queue.clear()
        except Exception:  # a mistake here must not cost the engine more than its recording
            logger.exception("a record could not be encoded")
            self._pause("a record could not be encoded")
            self._not_before = time.monotonic() + RETRY_S
            self._queue.clear()

    def _write_queued(self) -> None:
        frames: list[bytes] = []
        for _ in range(len(self._queue)):
            entry = self._queue.popleft()
            if isinstance(entry, _Boundary):
                self._write(frames)
                frames = []
                self._begin(entry)
            else:
                frames.append(frame(self._shortened(entry())))
        self._write(frames)

    def _write(self, frames: list[bytes]) -> None:
        if not frames:
            return
        self._ring.write(b"".join(frames))
        if self._is_paused or self._num_begun > self._num_files:
            return  # the next file is on its way
        self.wants_state = self._ring.num_written > self._ring.segment_bytes // 2
        self.needs_state = self._ring.num_written > self._ring.segment_bytes

    def _begin(self, boundary: _Boundary) -> None:
        state = None if boundary.state is None else snapshot.encode(boundary.state)
        head = Head(
            version=VERSION, quire_version=__version__, run=self._run, number=self._num_files,
            wall_time=boundary.wall_time, clock=boundary.clock, setup=self._setup, follows=boundary.follows,
            state=state,
        )  # fmt: skip
        self._ring.begin(self._num_files, frame(head))
        self._num_files += 1
        self._last_rows = b""

    def _shortened(self, record: Record) -> Record:
        """Without what is as in the step before."""
        if not isinstance(record, Schedule) or record.rows is None or record.num_tokens is None:
            return record
        rows = record.rows.tobytes()
        same, self._last_rows = rows == self._last_rows, rows
        all_ones = record.num_tokens.tobytes() == ONE * len(record.num_tokens)
        return msgspec.structs.replace(
            record, rows=None if same else record.rows, num_tokens=None if all_ones else record.num_tokens
        )


class _Boundary:
    """Where a file begins: the state there (None = nothing has happened), and whether the last one leads to it."""

    def __init__(self, state: snapshot.Node, follows: bool, clock: float, wall_time: float) -> None:
        self.state = state
        self.follows = follows
        self.clock = clock
        self.wall_time = wall_time
