"""TotalStats: the state of the control planes of all replicas as one, for what looks at an engine as a whole."""

from __future__ import annotations

from dataclasses import replace

from quire.core.engine_messages import EngineCoreOutputs
from quire.core.stats import SchedulerStats


class TotalStats:
    """Takes steps of replicas."""

    def __init__(self) -> None:
        self._by_engine: dict[int, SchedulerStats] = {}

    def note(self, step: EngineCoreOutputs) -> SchedulerStats:
        """The state after this step: sequences of all replicas, and the mean use of their caches.

        Counts of the step are those of the step.
        """
        self._by_engine[step.engine_index] = step.stats
        if len(self._by_engine) == 1:
            return step.stats
        parts = self._by_engine.values()
        return replace(
            step.stats,
            num_running=sum(one.num_running for one in parts),
            num_waiting=sum(one.num_waiting for one in parts),
            num_swapped=sum(one.num_swapped for one in parts),
            kv_cache_usage=sum(one.kv_cache_usage for one in parts) / len(parts),
        )
