"""LiveTotals: what an engine has counted so far, as plain numbers, so that two looks give rates and quantiles.

Made by `EngineMetrics.totals` when someone looks. Values only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True, slots=True)
class Distribution:
    """A histogram.

    Attributes:
        bounds: upper bounds, ascending; the last bucket has none.
        counts: [len(bounds) + 1] values in each bucket.
        total: sum of the values.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float

    @property
    def num_values(self) -> int:
        """How many values there are."""
        return sum(self.counts)

    @property
    def mean(self) -> float | None:
        """None when there are no values."""
        return self.total / self.num_values if self.num_values else None

    def since(self, before: Distribution) -> Distribution:
        """What came after `before`, an earlier look at the same histogram."""
        counts = tuple(now - then for now, then in zip(self.counts, before.counts, strict=True))
        return Distribution(self.bounds, counts, self.total - before.total)

    def quantile(self, share: float) -> float | None:
        """The value below which a share of the values is, as Prometheus' histogram_quantile: linear within a bucket.

        None when there are no values; the largest bound when it is above all bounds.
        """
        left = share * self.num_values
        if not self.num_values:
            return None
        lower = 0.0
        for bound, count in zip(self.bounds, self.counts, strict=False):
            if count and left <= count:
                return lower + (bound - lower) * left / count
            left -= count
            lower = bound
        return lower


PERF_TOTALS = ("flops", "moved_bytes", "possible_flops", "possible_bytes")


@dataclass(frozen=True, slots=True)
class LiveTotals:
    """Counts since the start of the server; tokens unless said otherwise.

    Attributes:
        computed: computed by steps, prompts and first tokens included.
        num_ended: requests.
        num_preemptions: requests that lost their row.
        prefix_queries, prefix_hits: prompt tokens looked up in the prefix cache, and found.
        drafted, accepted: draft tokens.
        ttft: seconds to the first token of ended requests.
        itl: seconds between tokens.
        flops, moved_bytes, possible_flops, possible_bytes: as `PerfMetrics`; 0 where these are not counted.
    """

    generated: float
    computed: float
    num_ended: float
    num_preemptions: float
    prefix_queries: float
    prefix_hits: float
    drafted: float
    accepted: float
    ttft: Distribution
    itl: Distribution
    flops: float = 0.0
    moved_bytes: float = 0.0
    possible_flops: float = 0.0
    possible_bytes: float = 0.0

    def since(self, before: LiveTotals) -> LiveTotals:
        """What came after `before`."""
        differences: dict[str, Any] = {}
        for one in fields(self):
            now, then = getattr(self, one.name), getattr(before, one.name)
            differences[one.name] = now.since(then) if isinstance(now, Distribution) else now - then
        return LiveTotals(**differences)


def value_of(counters: Sequence[object]) -> float:
    """The sum of prometheus_client's counters, of one series each."""
    return float(sum(counter.collect()[0].samples[0].value for counter in counters))  # type: ignore[attr-defined]
