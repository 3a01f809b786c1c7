"""StartReport: what the start of a server took, phase by phase. Made by `quire serve`; owns its list."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class StartReport:
    """Phases of a start, in seconds, from the beginning of the process."""

    def __init__(self) -> None:
        self._last = time.monotonic()
        self.phases: list[tuple[str, float]] = [("python and imports", process_age_s())]

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time what runs inside the block; what ran since the last phase is part of it."""
        yield
        now = time.monotonic()
        self.phases.append((name, now - self._last))
        self._last = now

    @property
    def total_s(self) -> float:
        """Seconds since the process began, up to the last phase's end."""
        return sum(seconds for _, seconds in self.phases)

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in self.phases)
        return f"ready in {self.total_s:.2f} s: {parts}"


def process_age_s() -> float:
    """Seconds since this process began; 0 where the system does not say."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        uptime_s = float(Path("/proc/uptime").read_text().split()[0])
    except OSError:
        return 0.0
    return max(0.0, uptime_s - int(fields[19]) / os.sysconf("SC_CLK_TCK"))
