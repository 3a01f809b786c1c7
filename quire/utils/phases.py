"""PhaseTimer: what a start took, phase by phase. Made by the server, by the engine core's process and by an engine in
one process; owns its list.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

Phases = Sequence[tuple[str, float]]


class PhaseTimer:
    """Phases of a start, in seconds, with no gap between them.

    Args:
        first: what this process did from its beginning until now; None = the first phase begins now.
    """

    def __init__(self, first: str | None = None) -> None:
        self._last = time.monotonic()
        self.phases: list[tuple[str, float]] = [] if first is None else [(first, process_age_s())]

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time what runs inside the block; what ran since the last phase is part of it."""
        yield
        self.end_phase(name)

    def end_phase(self, name: str) -> None:
        """What ran since the last phase was `name`."""
        now = time.monotonic()
        self.phases.append((name, now - self._last))
        self._last = now

    def __str__(self) -> str:
        return describe_phases(self.phases)


def describe_phases(phases: Phases) -> str:
    """As "ready in 1.50 s: this 1.00 s, that 0.50 s"."""
    parts = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in phases)
    return f"ready in {sum(seconds for _, seconds in phases):.2f} s: {parts}"


def process_age_s() -> float:
    """Seconds since this process began; 0 where the system does not say."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        uptime_s = float(Path("/proc/uptime").read_text().split()[0])
    except OSError:
        return 0.0
    return max(0.0, uptime_s - int(fields[19]) / os.sysconf("SC_CLK_TCK"))
