"""OffloadCounts: what a store has done, counted by its threads and read by the scheduler. Totals since the start."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field

from quire.kv_offload.faults import FaultKind


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadTotals:
    """Totals at one moment.

    Attributes:
        num_queries, num_hits: blocks that requests needed beyond the cache, and those of them that were loaded.
        num_loaded, num_stored: blocks; `loaded_bytes`, `stored_bytes`: their payloads.
        load_s, store_s: seconds that loads and stores took, each from its begin to its end.
        num_dropped: blocks that were not stored, as too many waited or the store was not usable.
        num_evicted: blocks that were removed to make room.
        num_kept_out: times that blocks were there and not loaded, as to compute them takes less time.
        faults: by kind.
    """

    num_queries: int = 0
    num_hits: int = 0
    num_loaded: int = 0
    num_stored: int = 0
    loaded_bytes: int = 0
    stored_bytes: int = 0
    load_s: float = 0.0
    store_s: float = 0.0
    num_dropped: int = 0
    num_evicted: int = 0
    num_kept_out: int = 0
    faults: dict[FaultKind, int] = field(default_factory=dict)


class OffloadCounts:
    """Counters that several threads add to."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._seconds: dict[str, float] = {"load_s": 0.0, "store_s": 0.0}
        self._faults: Counter[FaultKind] = Counter()

    def add(self, **counts: int) -> None:
        """Add to fields of `OffloadTotals`, by name."""
        with self._lock:
            self._counts.update(counts)

    def add_seconds(self, name: str, seconds: float) -> None:
        """Add to `load_s` or `store_s`."""
        with self._lock:
            self._seconds[name] += seconds

    def add_fault(self, kind: FaultKind) -> None:
        """Count one fault."""
        with self._lock:
            self._faults[kind] += 1

    def totals(self) -> OffloadTotals:
        """The totals now."""
        with self._lock:
            load_s, store_s = self._seconds["load_s"], self._seconds["store_s"]
            return OffloadTotals(**self._counts, load_s=load_s, store_s=store_s, faults=dict(self._faults))
