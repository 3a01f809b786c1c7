"""The clock by which steps with and without drafts are compared. Called by what builds engine cores and workers."""

from __future__ import annotations

import time
from collections.abc import Callable

from quire.config.device import ParallelConfig


def step_clock(parallel: ParallelConfig, *, is_cpu: bool) -> Callable[[], float]:
    """Seconds since some moment.

    Where the thread that runs the steps computes them, with others or alone, this is its processor time: while other
    programs have the processor none passes, which would make one kind of steps look slow by chance.
    """
    return time.thread_time if is_cpu and parallel.distributed_executor_backend == "uni" else time.perf_counter
