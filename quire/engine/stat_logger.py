"""StatLogger: one line of statistics every few seconds while steps run. Called by the engines; owns its window.

A window begins with a step, so that idle time thins out no rate. Who has a clock of its own calls `flush`, too: the
last steps before a pause get their line then, and not with the next request.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from quire.core.engine_messages import EngineCoreOutputs
from quire.core.stats import SchedulerStats
from quire.logger import get_logger
from quire.utils.memory import format_bytes

INTERVAL_S = 10.0

logger = get_logger(__name__)


class StatLogger:
    """Sums steps up to a line.

    Args:
        clock: seconds.
        interval_s: seconds between lines.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, interval_s: float = INTERVAL_S) -> None:
        self._clock = clock
        self._interval_s = interval_s
        self._stats = SchedulerStats()
        self._start = 0.0
        self._num_steps = self._num_computed = self._num_generated = 0
        self._num_preemptions = self._num_queries = self._num_hits = 0

    def record(self, step: EngineCoreOutputs) -> None:
        """Take in one step; log when the window is full."""
        self._stats = stats = step.stats
        if not self._num_steps:
            self._start = self._clock()
        self._num_steps += 1
        self._num_computed += stats.num_scheduled_tokens
        self._num_generated += len(step.handles)
        self._num_preemptions += stats.num_preemptions
        self._num_queries += stats.prefix_cache_queries
        self._num_hits += stats.prefix_cache_hits
        if self._clock() - self._start >= self._interval_s:
            self.flush()

    def flush(self) -> None:
        """Log what the window holds; nothing when no step was taken."""
        if not self._num_steps:
            return
        seconds, stats = max(1e-3, self._clock() - self._start), self._stats
        logger.info(
            "%.0f tokens/s computed, %.0f tokens/s generated, %d running, %d waiting%s, %d preemptions, "
            "KV cache %.1f%% used, prefix cache hits %.1f%%%s",
            self._num_computed / seconds,
            self._num_generated / seconds,
            stats.num_running,
            stats.num_waiting,
            f", {stats.num_swapped} swapped" if stats.num_swapped else "",
            self._num_preemptions,
            100 * stats.kv_cache_usage,
            100 * self._num_hits / max(1, self._num_queries),
            f", {stats.num_state_checkpoints} states kept ({format_bytes(stats.state_checkpoint_bytes)})"
            if stats.num_state_checkpoints
            else "",
        )
        self._clear()

    def _clear(self) -> None:
        self._num_steps = self._num_computed = self._num_generated = 0
        self._num_preemptions = self._num_queries = self._num_hits = 0
