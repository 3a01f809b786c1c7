"""BlockStore: a place that keeps blocks by their keys, as the two halves of a tier use it. Nothing here ever waits.

Lookups answer at once from memory; stores and loads are jobs with ids, carried out by threads of the store and reported
by `get_finished`. All calls are made by one thread, the one that runs the steps.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, Protocol

import numpy as np

from quire.core.stats import OffloadStats


class BlockMemory(Protocol):
    """The blocks of the KV cache, as bytes; called by the threads of a store.

    Attributes:
        num_block_bytes: of the largest block, in all layers.
    """

    num_block_bytes: int

    def num_bytes_of(self, block_id: int) -> int:
        """Bytes of a block in all layers; they differ from pool to pool."""
        ...

    def read_into(self, block_id: int, payload: np.ndarray) -> None:
        """Copy a block to `payload` ([num_bytes_of(block_id)] uint8)."""
        ...

    def write_from(self, block_id: int, payload: np.ndarray) -> None:
        """Copy `payload` ([num_bytes_of(block_id)] uint8) to a block."""
        ...


@dataclass(frozen=True, slots=True)
class FinishedJobs:
    """Ids of jobs that have ended since the last report. Blocks of a failed load hold anything."""

    done: tuple[int, ...] = ()
    failed: tuple[int, ...] = ()


class Place(IntEnum):
    """Where a block is."""

    NOWHERE = 0
    HOST = 1
    DISK = 2


class Found(NamedTuple):
    """Blocks that a store has, and how many of them are not in host memory, so that they take time."""

    num_blocks: int
    num_on_disk: int


class BlockStore(ABC):
    """Blocks by key."""

    @abstractmethod
    def start(self, memory: BlockMemory) -> None:
        """Be given the cache, before the first job."""

    @abstractmethod
    def lookup(self, keys: Sequence[bytes], first: int = 0) -> Found:
        """How many of `keys[first:]`, from their beginning on, are here."""

    @abstractmethod
    def places(self, keys: Sequence[bytes]) -> np.ndarray:
        """[len(keys)] uint8: the `Place` of each."""

    @property
    @abstractmethod
    def is_hung(self) -> bool:
        """Whether the disk does not answer."""

    @abstractmethod
    def is_of_others(self, key: bytes) -> bool:
        """Whether the disk has a block of these tokens for other weights, settings or builds."""

    @abstractmethod
    def touch(self, keys: Sequence[bytes]) -> None:
        """Blocks of one sequence, in its order, were used; those that are not here are left out."""

    @abstractmethod
    def submit_store(self, job_id: int, keys: Sequence[bytes], block_ids: Sequence[int]) -> None:
        """Begin to store blocks, which do not change until the job is reported; a second time it changes nothing."""

    @property
    @abstractmethod
    def copies_at_once(self) -> bool:
        """Whether `copy_now` keeps anything."""

    @abstractmethod
    def copy_now(self, keys: Sequence[bytes], block_ids: Sequence[int]) -> None:
        """Copy blocks to host memory before this returns; they are used for something else then."""

    @abstractmethod
    def submit_load(
        self, job_id: int, keys: Sequence[bytes], block_ids: Sequence[int], time_limit_s: float | None = None
    ) -> None:
        """Begin to load blocks, which nothing else reads or writes until the job is reported.

        Args:
            time_limit_s: after which the load has failed; None = there is none.
        """

    @abstractmethod
    def prefetch(self, keys: Sequence[bytes]) -> None:
        """Bring blocks nearer that will be loaded soon: from the disk to host memory, where there is any."""

    @abstractmethod
    def get_finished(self) -> FinishedJobs:
        """Jobs that have ended since the last call, those that are given up included."""

    @abstractmethod
    def give_up_stores(self) -> None:
        """The blocks of stores are needed: end these with the next report, whatever they have stored."""

    @property
    @abstractmethod
    def num_storing(self) -> int:
        """Blocks of stores that have not been reported."""

    @abstractmethod
    def count_dropped(self, num_blocks: int) -> None:
        """Blocks were not submitted, as too many waited."""

    @abstractmethod
    def count_kept_out(self) -> None:
        """Blocks were here and not loaded, as to compute them takes less time."""

    @abstractmethod
    def take_load_times(self) -> list[tuple[int, float]]:
        """(bytes from the disk, seconds) of the loads from it that were done since the last call."""

    @abstractmethod
    def take_stats(self) -> OffloadStats | None:
        """What was done since the last call; None = nothing."""

    @abstractmethod
    def totals(self) -> OffloadStats:
        """What was done since the start."""

    @abstractmethod
    def close(self, seconds: float = 0.0) -> None:
        """End the threads, after at most `seconds` for what is being stored; harmless when repeated."""
