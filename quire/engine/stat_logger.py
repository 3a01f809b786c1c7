"""StatLogger: one line of statistics every few seconds while steps run. Called by the engines; owns its window.

A window begins with a step, so that idle time thins out no rate. Who has a clock of its own calls `flush`, too: the
last steps before a pause get their line then, and not with the next request.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from quire.core.draft_stats import DraftOutcomes, accepted_by_position
from quire.core.engine_messages import EngineCoreOutputs
from quire.core.speculation_stats import ControllerStats
from quire.core.stats import SchedulerStats
from quire.core.step_perf import STEP_KINDS, StepPerf
from quire.logger import get_logger
from quire.utils.memory import format_bytes

INTERVAL_S = 10.0

logger = get_logger(__name__)


class StatLogger:
    """Sums steps up to a line.

    Args:
        clock: seconds.
        interval_s: seconds between lines.
        name: what lines begin with.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, interval_s: float = INTERVAL_S, name: str = ""
    ) -> None:
        self._name = name
        self._clock = clock
        self._interval_s = interval_s
        self._stats = SchedulerStats()
        self._start = 0.0
        self._num_steps = self._num_computed = self._num_generated = 0
        self._num_preemptions = self._num_queries = self._num_hits = 0
        self._drafts: list[DraftOutcomes] = []
        self._perf: list[StepPerf] = []
        self._decided: ControllerStats | None = None
        self._decided_before: ControllerStats | None = None

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
        if step.drafts is not None:
            self._drafts.append(step.drafts)
        if step.perf is not None:
            self._perf.append(step.perf)
        if step.speculation is not None:
            self._decided = step.speculation.controller
        if self._clock() - self._start >= self._interval_s:
            self.flush()

    def flush(self) -> None:
        """Log what the window holds; nothing when no step was taken."""
        if not self._num_steps:
            return
        seconds, stats = max(1e-3, self._clock() - self._start), self._stats
        logger.info(
            "%s%.0f tokens/s computed, %.0f tokens/s generated, %d running, %d waiting%s, %d preemptions, "
            "KV cache %.1f%% used, prefix cache hits %.1f%%%s",
            self._name,
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
        if self._drafts:
            _log_drafts(self._drafts, seconds)
        if self._perf:
            logger.info("%s%s", self._name, describe_perf(self._perf))
        if self._decided is not None:
            _log_decisions(self._decided.since(self._decided_before))
            self._decided_before = self._decided
        self._clear()

    def _clear(self) -> None:
        self._num_steps = self._num_computed = self._num_generated = 0
        self._num_preemptions = self._num_queries = self._num_hits = 0
        self._drafts, self._perf = [], []


def describe_perf(steps: list[StepPerf]) -> str:
    """What steps computed and moved a second, and the share of the limits that this is, by kind of step."""
    parts = []
    for kind in STEP_KINDS:
        chosen = [one for one in steps if one.kind == kind]
        if not chosen:
            continue
        seconds, last = sum(one.seconds for one in chosen) or 1e-9, chosen[-1]
        flops = sum(one.flops for one in chosen) / seconds
        moved = sum(one.read_bytes + one.write_bytes for one in chosen) / seconds
        text = f"{kind} {flops / 1e9:.1f} GFLOP/s, {moved / 1e9:.1f} GB/s"
        if last.flops_limit and last.bytes_limit:
            text += f" (MFU {flops / last.flops_limit:.1%}, MBU {moved / last.bytes_limit:.1%})"
        parts.append(text)
    return "steps: " + "; ".join(parts)


def _log_drafts(steps: list[DraftOutcomes], seconds: float) -> None:
    """Log what the drafts of a window came to."""
    accepted = np.concatenate([step.num_accepted for step in steps])
    num_drafted, num_accepted = sum(int(step.num_drafted.sum()) for step in steps), int(accepted.sum())
    logger.info(
        "drafts: mean acceptance length %.2f, %.0f tokens/s drafted, %.0f tokens/s accepted (%.1f%%), by position %s",
        1 + num_accepted / len(accepted), num_drafted / seconds, num_accepted / seconds,
        100 * num_accepted / num_drafted,
        ", ".join(f"{count / len(accepted):.2f}" for count in accepted_by_position(accepted)) or "none",
    )  # fmt: skip


def _log_decisions(decided: ControllerStats) -> None:
    """Log what was decided about drafts in a window, if anything was."""
    steps = ", ".join(f"{count} {reason.value}" for reason, count in decided.reasons.items() if count)
    if not steps:
        return
    closed = [bucket.name for bucket in decided.buckets if bucket.is_closed]
    logger.info(
        "drafts: steps %s; %d tokens proposed in %.0f ms; closed to drafts: %s",
        steps, decided.num_proposed, 1e3 * decided.proposing_s, "; ".join(closed) or "no load",
    )  # fmt: skip
