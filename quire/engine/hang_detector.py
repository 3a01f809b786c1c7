"""HangDetector: tells a core that hangs from one that has much to do. Called by `core_launcher` a few times a second.

A core that should advance and does not is stuck when its process has not used the CPU for `timeout_s` either (it was
stopped, or its threads wait for each other), or when it is far beyond what its step should take. Time in which the
watcher itself did not run (a suspended machine) does not count.
"""

from __future__ import annotations

from dataclasses import dataclass

# A step may take this many times what the slowest step so far took per token.
STEP_SLACK = 20.0
# While it uses the CPU, a core may go without an end of a step for this many times the timeout.
BUSY_FACTOR = 6.0
# A starting core reads files and compiles nothing we can count.
START_FACTOR = 6.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One look at a core.

    Attributes:
        progress: anything that changes whenever the core advances.
        should_advance: it has something to do.
        cpu_s: CPU seconds its process has used; None where that says nothing.
        is_starting: it is still being built.
        step_s: what its step would take at the pace of its slowest step so far; 0 = unknown.
    """

    progress: tuple[int, ...]
    should_advance: bool
    cpu_s: float | None
    is_starting: bool = False
    step_s: float = 0.0


class HangDetector:
    """Keeps how long the core has been quiet.

    Args:
        timeout_s: seconds without progress and without work after which a core is stuck.
        max_gap_s: most seconds that one look adds.
    """

    def __init__(self, timeout_s: float, max_gap_s: float = 1.0) -> None:
        self._timeout_s = timeout_s
        self._max_gap_s = max_gap_s
        self._last: Sample | None = None
        self._without_progress_s = 0.0
        self._without_work_s = 0.0

    @property
    def quiet_s(self) -> float:
        """Seconds for which the core should have advanced and did not."""
        return self._without_progress_s

    def observe(self, sample: Sample, elapsed_s: float) -> str | None:
        """Take a look, `elapsed_s` after the one before; why the core is stuck, None = it is not."""
        last, self._last = self._last, sample
        if last is None or not sample.should_advance or sample.progress != last.progress:
            self._without_progress_s = self._without_work_s = 0.0
            return None
        gap_s = min(elapsed_s, self._max_gap_s)
        self._without_progress_s += gap_s
        has_worked = sample.cpu_s is None or last.cpu_s is None or sample.cpu_s > last.cpu_s
        self._without_work_s = 0.0 if has_worked else self._without_work_s + gap_s
        factor = START_FACTOR if sample.is_starting else 1.0
        if self._without_work_s >= factor * self._timeout_s:
            return f"no progress and no use of the CPU for {self._without_work_s:.1f} s"
        limit_s = max(BUSY_FACTOR * self._timeout_s, STEP_SLACK * sample.step_s)
        if not sample.is_starting and self._without_progress_s >= limit_s:
            return f"no step ended for {self._without_progress_s:.1f} s"
        return None
