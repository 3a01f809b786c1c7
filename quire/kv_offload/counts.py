"""OffloadCounts: what a store has done, counted by its threads, and taken by the thread that runs the steps."""

from __future__ import annotations

import threading
from typing import Any

from quire.core.stats import OffloadStats
from quire.kv_offload.faults import FaultKind


class OffloadCounts:
    """Counters that several threads add to."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._totals = _Sums()
        self._since_taken = _Sums()
        self._is_changed = False

    def add(self, **counts: float) -> None:
        """Add to fields of `OffloadStats`, by name."""
        with self._lock:
            self._is_changed = True
            for sums in (self._totals, self._since_taken):
                for name, count in counts.items():
                    sums.counts[name] = sums.counts.get(name, 0) + count

    def add_fault(self, kind: FaultKind) -> None:
        """Count one fault."""
        with self._lock:
            self._is_changed = True
            for sums in (self._totals, self._since_taken):
                sums.faults[kind.value] = sums.faults.get(kind.value, 0) + 1

    def totals(self) -> OffloadStats:
        """Since the start."""
        with self._lock:
            return self._totals.freeze()

    def take(self) -> OffloadStats | None:
        """Since the last call; None = nothing was counted."""
        if not self._is_changed:
            return None
        with self._lock:
            taken, self._since_taken, self._is_changed = self._since_taken, _Sums(), False
        return taken.freeze()


class _Sums:
    def __init__(self) -> None:
        self.counts: dict[str, Any] = {}
        self.faults: dict[str, int] = {}

    def freeze(self) -> OffloadStats:
        return OffloadStats(**self.counts, faults=dict(self.faults))
