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

ADDED_TYPES = frozenset(("counter", "histogram", "summary"))
ADDED_GAUGES = frozenset(("process_virtual_memory_bytes", "process_resident_memory_bytes", "process_open_fds"))
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


def counted(families: Iterable[Family]) -> list[Family]:
    """What stays of a process that has ended: what it counted."""
    return [one for one in families if one.type in ADDED_TYPES]


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
