"""Seat: a process's place in a group of one machine, before it has the means to communicate. Made by an executor."""

from __future__ import annotations

from dataclasses import dataclass

from quire.distributed.shared_memory import DEFAULT_CAPACITY


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """One rank of a group.

    Attributes:
        fd: of the region that the ranks share (`shared_memory.make_region`).
        capacity: of the region.
        cache_fds: of memory for the KV cache of each rank, which rank 0 maps too; empty = every cache is private.
        timeout_s: for which a rank waits for another.
    """

    rank: int
    size: int
    fd: int
    capacity: int = DEFAULT_CAPACITY
    timeout_s: float = 60.0
    cache_fds: tuple[int, ...] = ()
