"""Counts by name that several threads add to; taken by `get_kv_connector_stats`."""

from __future__ import annotations

import threading
from collections import Counter


class Counts:
    """Numbers since the last `take`."""

    def __init__(self) -> None:
        self._numbers: Counter[str] = Counter()
        self._lock = threading.Lock()

    def add(self, name: str, number: int = 1) -> None:
        """Count; from any thread."""
        if number:
            with self._lock:
                self._numbers[name] += number

    def __len__(self) -> int:
        return len(self._numbers)

    def take(self) -> dict[str, float]:
        """What was counted since the last call."""
        if not self._numbers:
            return {}
        with self._lock:
            numbers, self._numbers = self._numbers, Counter()
        return dict(numbers)
