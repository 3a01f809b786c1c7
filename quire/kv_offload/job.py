"""Job: blocks that are stored or loaded, between the thread that asked for it and those that do it.

The lock of a job is held while memory of the cache is copied. So a job that was given up touches no block any longer,
whatever a disk does later.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from enum import Enum

import numpy as np


class JobState(Enum):
    """How far a job is."""

    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"


class Job:
    """Blocks and where they go.

    Attributes:
        keys, block_ids: of each block.
        begun_at, deadline: seconds on the store's clock; infinity = there is no deadline.
        bytes_on_disk: of a load, those that come from a disk.
        ended_at: the same, once it is done.
    """

    def __init__(
        self,
        job_id: int,
        keys: Sequence[bytes],
        block_ids: Sequence[int],
        begun_at: float,
        deadline: float = float("inf"),
        *,
        is_store: bool,
        bytes_on_disk: int = 0,
    ) -> None:
        self.job_id, self.keys, self.block_ids = job_id, keys, block_ids
        self.begun_at, self.deadline, self.is_store = begun_at, deadline, is_store
        self.bytes_on_disk = bytes_on_disk
        self._lock = threading.Lock()
        self.ended_at = begun_at
        self._num_left = len(keys)
        self._num_taken = 0
        self._state = JobState.RUNNING

    @property
    def state(self) -> JobState:
        """How far it is."""
        return self._state

    @property
    def is_over(self) -> bool:
        """Whether nothing is to be done for it any longer."""
        return self._state is not JobState.RUNNING

    def take(self) -> int | None:
        """The number of a block that no other thread has taken; None = there is none left, or the job is over."""
        with self._lock:
            if self.is_over or self._num_taken == len(self.keys):
                return None
            self._num_taken += 1
            return self._num_taken - 1

    def copy(self, copy: Callable[[int, np.ndarray], None], number: int, payload: np.ndarray) -> bool:
        """Copy block `number` by a method of the cache's memory; False, and nothing done, if the job is over."""
        with self._lock:
            if not self.is_over:
                copy(int(self.block_ids[number]), payload)
            return not self.is_over

    def note_block(self, now: float) -> bool:
        """One block is through; True if the job ended by that."""
        with self._lock:
            self._num_left -= 1
            self.ended_at = now
            return self._end_if(not self._num_left, JobState.DONE)

    def give_up(self) -> bool:
        """From now on no memory is touched for it; False if it was over before."""
        with self._lock:
            return self._end_if(True, JobState.FAILED)

    def _end_if(self, is_end: bool, state: JobState) -> bool:
        if not is_end or self.is_over:
            return False
        self._state = state
        return True
