"""LoadTimes: how long a model takes to load, from the size of its files and the loads that were measured.

Told by the schedule of every load; asked by it for predictions. Owns the measured rates.
"""

from __future__ import annotations

FIXED_S = 2.0
"""Of a load before any was measured: a process and its imports, the tokenizer, a first step."""
S_PER_BYTE = 1.0 / (1 << 30)
"""Before any load was measured."""
NEWEST = 0.5
"""Weight of the newest load in a mean."""


class LoadTimes:
    """Predicts the next load: of a model that was loaded before from its own loads, of another from those of all."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._s_per_byte = S_PER_BYTE

    @property
    def s_per_gb(self) -> float:
        """Seconds for 10^9 bytes of files, the fixed part left out: the mean of the loads so far."""
        return 1e9 * self._s_per_byte

    def note(self, model: str, file_bytes: int, seconds: float) -> None:
        """A load has ended."""
        mean = self._seconds.get(model, seconds)
        self._seconds[model] = mean + NEWEST * (seconds - mean)
        if file_bytes > 0:
            measured = max(0.0, seconds - FIXED_S) / file_bytes
            self._s_per_byte += NEWEST * (measured - self._s_per_byte)

    def predict(self, model: str, file_bytes: int) -> float:
        """Seconds that a load of `model` takes."""
        return self._seconds.get(model, FIXED_S + file_bytes * self._s_per_byte)
