"""A histogram cheap enough for every token and request. Registered with prometheus_client as a collector of its own."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, MutableSequence, Sequence
from itertools import accumulate
from typing import ClassVar

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector, CollectorRegistry

from quire.metrics.live_totals import Distribution


def own_row(name: str, doc: str, bounds: Sequence[str], labels: dict[str, str]) -> MutableSequence[float]:
    """Counts by bucket, then the sum of values, in memory of this process."""
    return [0.0] * (len(bounds) + 1)


class QuickHistogram(Collector):
    """Counts by bucket, written and read on one thread.

    Args:
        name, doc: as shown.
        bounds: upper bounds, ascending; infinity is added.
        labels: of the only series.

    Attributes:
        new_row: makes the counts of those that are made from now on; `own_row` unless others look at them.
    """

    new_row: ClassVar[Callable[[str, str, Sequence[str], dict[str, str]], MutableSequence[float]]] = staticmethod(
        own_row
    )

    def __init__(
        self, name: str, doc: str, bounds: Sequence[float], labels: dict[str, str], registry: CollectorRegistry
    ) -> None:
        self._name, self._doc, self._labels = name, doc, labels
        self._bounds = [float(bound) for bound in bounds]
        self._shown = [*map(repr, self._bounds), "+Inf"]
        self._counts = QuickHistogram.new_row(name, doc, self._shown, labels)
        registry.register(self)

    def observe(self, value: float, count: int = 1) -> None:
        """Take in `value`, seen `count` times."""
        counts = self._counts
        counts[bisect_left(self._bounds, value)] += count
        counts[-1] += value * count

    def distribution(self) -> Distribution:
        """All that was taken in."""
        *counts, total = self._counts
        return Distribution(tuple(self._bounds), tuple(map(int, counts)), total)

    def describe(self) -> Iterable[HistogramMetricFamily]:
        """Name and kind, for the registry."""
        return [HistogramMetricFamily(self._name, self._doc, labels=list(self._labels))]

    def collect(self) -> Iterable[HistogramMetricFamily]:
        """The series as it is now."""
        family = HistogramMetricFamily(self._name, self._doc, labels=list(self._labels))
        *counts, sum_value = self._counts
        below = list(zip(self._shown, accumulate(map(int, counts)), strict=True))
        family.add_metric(list(self._labels.values()), buckets=below, sum_value=sum_value)
        return [family]
