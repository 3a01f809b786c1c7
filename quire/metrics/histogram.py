"""A histogram cheap enough for every token and request. Registered with prometheus_client as a collector of its own."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector, CollectorRegistry

from quire.metrics.live_totals import Distribution


class QuickHistogram(Collector):
    """Counts by bucket, written and read on one thread.

    Args:
        name, doc: as shown.
        bounds: upper bounds, ascending; infinity is added.
        labels: of the only series.
    """

    def __init__(
        self, name: str, doc: str, bounds: Sequence[float], labels: dict[str, str], registry: CollectorRegistry
    ) -> None:
        self._name, self._doc, self._labels = name, doc, labels
        self._bounds = [float(bound) for bound in bounds]
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0
        registry.register(self)

    def observe(self, value: float, count: int = 1) -> None:
        """Take in `value`, seen `count` times."""
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def distribution(self) -> Distribution:
        """All that was taken in."""
        return Distribution(tuple(self._bounds), tuple(self._counts), self._sum)

    def describe(self) -> Iterable[HistogramMetricFamily]:
        """Name and kind, for the registry."""
        return [HistogramMetricFamily(self._name, self._doc, labels=list(self._labels))]

    def collect(self) -> Iterable[HistogramMetricFamily]:
        """The series as it is now."""
        family = HistogramMetricFamily(self._name, self._doc, labels=list(self._labels))
        total, buckets = 0, []
        for bound, count in zip([*self._bounds, float("inf")], self._counts, strict=True):
            total += count
            buckets.append(("+Inf" if bound == float("inf") else repr(bound), total))
        family.add_metric(list(self._labels.values()), buckets=buckets, sum_value=self._sum)
        return [family]
