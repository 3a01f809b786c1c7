"""Metrics of several processes as one page: families as values that can be sent, and their sums.

Used where several front-end processes serve on one port. Counters and histograms add up. A gauge is what one process
says of all of them, as the others have 0, or the same: the largest counts. Of processes that have ended the counters
stay.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
from prometheus_client import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from quire.core.stats import SchedulerStats
from quire.metrics.live_totals import Distribution, LiveTotals

ADDED_TYPES = frozenset(("counter", "histogram", "summary"))
HELD = "quire:num_requests_held"
ADDED_GAUGES = frozenset(("process_virtual_memory_bytes", "process_resident_memory_bytes", "process_open_fds", HELD))
SMALLEST = "process_start_time_seconds"

Labels = tuple[tuple[str, str], ...]


class Family(msgspec.Struct, frozen=True):
    """The series of one name.

    Attributes:
        samples: (name, labels, value) of each.
    """

    name: str
    documentation: str
    type: str
    samples: list[tuple[str, dict[str, str], float]]


def families_of(collector: Collector) -> list[Family]:
    """The series of a collector as values."""
    return [
        Family(one.name, one.documentation, one.type, [(s.name, dict(s.labels), float(s.value)) for s in one.samples])
        for one in collector.collect()
    ]


def merged(parts: Sequence[Sequence[Family]]) -> list[Family]:
    """The families of several processes as those of one."""
    first: dict[str, Family] = {}
    values: dict[str, dict[tuple[str, Labels], float]] = {}
    for families in parts:
        for family in families:
            first.setdefault(family.name, family)
            known = values.setdefault(family.name, {})
            for name, labels, value in family.samples:
                key = name, tuple(labels.items())
                known[key] = value if key not in known else _joined(family, name, known[key], value)
    return [
        Family(name, family.documentation, family.type, [(one, dict(at), v) for (one, at), v in values[name].items()])
        for name, family in first.items()
    ]


class SummedTotals:
    """What several processes have counted, as an `EngineMetrics` says it of one: `totals` and `last_stats`."""

    def __init__(self) -> None:
        self._families: dict[str, Family] = {}

    def update(self, families: Iterable[Family]) -> None:
        """Take in what they have counted by now."""
        self._families = {one.name: one for one in families}

    def totals(self) -> LiveTotals:
        """As `EngineMetrics.totals`."""
        ttft, seconds = self._distribution("vllm:time_to_first_token_seconds"), self._sum("quire:step_seconds")
        return LiveTotals(
            self._sum("vllm:generation_tokens"), self._distribution("vllm:iteration_tokens_total").total,
            ttft.num_values, self._sum("vllm:num_preemptions"), self._sum("vllm:prefix_cache_queries"),
            self._sum("vllm:prefix_cache_hits"), self._sum("vllm:spec_decode_num_draft_tokens"),
            self._sum("vllm:spec_decode_num_accepted_tokens"), ttft=ttft,
            itl=self._distribution("vllm:inter_token_latency_seconds"),
            flops=self._sum("quire:step_flops"), moved_bytes=self._sum("quire:step_bytes"),
            possible_flops=seconds * max(self._values("quire:limit_flops"), default=0.0),
            possible_bytes=seconds * max(self._values("quire:limit_bytes_per_second"), default=0.0),
        )  # fmt: skip

    @property
    def last_stats(self) -> SchedulerStats:
        """What a series of states shows of `EngineMetrics.last_stats`: sequences of all cores, mean use of caches."""
        usages = self._values("vllm:kv_cache_usage_perc")
        return SchedulerStats(
            num_running=round(self._sum("vllm:num_requests_running")),
            num_waiting=round(self._sum("vllm:num_requests_waiting")),
            kv_cache_usage=sum(usages) / max(1, len(usages)),
        )

    def _values(self, name: str) -> list[float]:
        family = self._families.get(name)
        samples = () if family is None else family.samples
        return [value for sample, _, value in samples if not sample.endswith("_created")]

    def _sum(self, name: str) -> float:
        return sum(self._values(name))

    def _distribution(self, name: str) -> Distribution:
        family, below, total = self._families.get(name), dict[float, float](), 0.0
        for sample, labels, value in () if family is None else family.samples:
            if sample.endswith("_bucket"):
                bound = float(labels["le"])
                below[bound] = below.get(bound, 0.0) + value
            elif sample.endswith("_sum"):
                total += value
        bounds = sorted(below)
        counts = [round(below[one] - before) for one, before in zip(bounds, self._before(below, bounds), strict=True)]
        return Distribution(tuple(bounds[:-1]), tuple(counts), total)

    @staticmethod
    def _before(below: dict[float, float], bounds: list[float]) -> list[float]:
        return [0.0, *(below[one] for one in bounds[:-1])][: len(bounds)]


def page_of(families: Sequence[Family]) -> bytes:
    """Families in Prometheus' text format."""
    return generate_latest(_Page(families))


def _joined(family: Family, name: str, one: float, other: float) -> float:
    if name.endswith("_created") or family.name == SMALLEST:
        return min(one, other)
    if family.type in ADDED_TYPES or family.name in ADDED_GAUGES:
        return one + other
    return max(one, other)


class _Page(Collector):
    def __init__(self, families: Sequence[Family]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        for family in self._families:
            metric = Metric(family.name, family.documentation, family.type)
            for name, labels, value in family.samples:
                metric.add_sample(name, labels, value)
            yield metric
