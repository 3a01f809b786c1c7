"""HangDetector: distinguishes a core that hangs from a busy one. Called by `core_launcher` a few times a second.

A core that should advance and does not is stuck when its process has not used the CPU for `timeout_s` either (it was
stopped, or its threads wait for each other), or when it has used far more of it than its step should take (it spins).
Time in which the watcher itself did not run (a suspended machine) does not count.
"""

from __future__ import annotations

from dataclasses import dataclass

# A step may take this many times what the slowest step so far took per token.
STEP_SLACK = 20.0
# However few its tokens, it may take this many times the longest step so far.
LONGEST_SLACK = 3.0
# CPU seconds that the first use of something may cost a step, whatever its pace.
FIRST_USE_S = 5.0
# Where its pace or its CPU time is unknown, a step may take this many times the timeout.
BUSY_FACTOR = 6.0
# A starting core reads files and compiles nothing we can count.
START_FACTOR = 6.0
# After this share of the timeout a core is suspected.
SUSPICION = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One look at a core.

    Attributes:
        progress: anything that changes whenever the core advances.
        should_advance: it has something to do.
        cpu_s: CPU seconds its process has used; None where that says nothing.
        is_stopped: a signal has stopped it.
        is_waiting: it waits for a CPU or a disk, which counts as work.
        is_starting: it is still being built.
        step_s: what its step would take at the pace of its slowest step so far; 0 = unknown. In CPU seconds where
            these are known, else in seconds.
        longest_step_s: what its longest step so far took, in the same.
    """

    progress: tuple[int, ...]
    should_advance: bool
    cpu_s: float | None
    is_stopped: bool = False
    is_waiting: bool = False
    is_starting: bool = False
    step_s: float = 0.0
    longest_step_s: float = 0.0


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
        self._stalled_cpu_s = 0.0

    @property
    def stalled_s(self) -> float:
        """Seconds for which the core should have advanced and did not."""
        return self._without_progress_s

    @property
    def is_suspicious(self) -> bool:
        """True when a core that runs has neither advanced nor worked for half the timeout."""
        is_starting = self._last is not None and self._last.is_starting
        return not is_starting and self._without_work_s >= SUSPICION * self._timeout_s

    def observe(self, sample: Sample, elapsed_s: float) -> str | None:
        """Take a look, `elapsed_s` after the one before; why the core is stuck, None = it is not."""
        last, self._last = self._last, sample
        if last is None or not sample.should_advance or sample.progress != last.progress:
            self._without_progress_s = self._without_work_s = self._stalled_cpu_s = 0.0
            return None
        gap_s = min(elapsed_s, self._max_gap_s)
        self._without_progress_s += gap_s
        cpu_s = None if sample.cpu_s is None or last.cpu_s is None else sample.cpu_s - last.cpu_s
        self._stalled_cpu_s += cpu_s or 0.0
        is_working = not sample.is_stopped and (sample.is_waiting or cpu_s is None or cpu_s > 0)
        self._without_work_s = 0.0 if is_working else self._without_work_s + gap_s
        return self._verdict(sample)

    def _verdict(self, sample: Sample) -> str | None:
        timeout_s = START_FACTOR * self._timeout_s if sample.is_starting else self._timeout_s
        if self._without_work_s >= timeout_s:
            return f"no progress and no CPU use for {self._without_work_s:.1f} s"
        if sample.is_starting or self._without_progress_s < timeout_s:
            return None
        slack_s = max(STEP_SLACK * sample.step_s, LONGEST_SLACK * sample.longest_step_s)
        most_cpu_s = max(timeout_s, FIRST_USE_S, slack_s)
        if sample.step_s and self._stalled_cpu_s >= most_cpu_s:
            return f"its step has used {self._stalled_cpu_s:.1f} s of CPU time, expected {sample.step_s:.2g} s"
        if self._without_progress_s >= max(BUSY_FACTOR * timeout_s, STEP_SLACK * sample.step_s):
            return f"no step finished for {self._without_progress_s:.1f} s"
        return None
