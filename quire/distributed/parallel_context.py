"""Rank and sizes as a value, given to constructors (no process-wide state)."""

from __future__ import annotations

from dataclasses import dataclass

from quire.distributed.pipeline import PipelineStage


@dataclass(frozen=True, slots=True)
class ParallelContext:
    """This worker's place among the processes that share a model.

    Attributes:
        tensor_parallel_rank, tensor_parallel_size: among those that have the same layers.
        stage: the layers that it has; None = all.
    """

    tensor_parallel_rank: int = 0
    tensor_parallel_size: int = 1
    stage: PipelineStage | None = None
