"""Rank and sizes as a value, given to constructors (no process-wide state)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ParallelContext:
    """This worker's place among the processes that share a model."""

    tensor_parallel_rank: int = 0
    tensor_parallel_size: int = 1
