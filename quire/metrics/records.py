"""Figures as plain records: what a program reads of a registry, under vLLM's class names.

Made by `read`, for `LLM.get_metrics`. No state.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Metric:
    """A figure.

    Attributes:
        name: without Prometheus' suffixes.
        labels: what distinguishes it from others of the same name.
    """

    name: str
    labels: dict[str, str]


@dataclass(frozen=True, slots=True)
class Counter(Metric):
    """A number that only grows."""

    value: int


@dataclass(frozen=True, slots=True)
class Vector(Metric):
    """Counters by position."""

    values: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Gauge(Metric):
    """A number as of now."""

    value: float


@dataclass(frozen=True, slots=True)
class Histogram(Metric):
    """How often values were at most so large.

    Attributes:
        count, sum: of all values.
        buckets: upper bound, as text ("+Inf" the last) -> values at most that.
    """

    count: int
    sum: float
    buckets: dict[str, int]


OWN = re.compile("(vllm|quire):")
POSITION = "position"


def read(families: Iterable[Any]) -> list[Metric]:
    """The engine's own figures among Prometheus' `families` (what a registry collects), in their order."""
    found: list[Metric] = []
    for family in families:
        if not OWN.match(family.name):
            continue
        if family.type == "histogram":
            found.extend(_histograms(family))
            continue
        if any(POSITION in sample.labels for sample in family.samples):
            found.extend(_vectors(family))
            continue
        for sample in family.samples:
            if family.type == "gauge":
                found.append(Gauge(family.name, dict(sample.labels), sample.value))
            elif family.type == "counter" and sample.name.endswith("_total"):
                found.append(Counter(family.name, dict(sample.labels), int(sample.value)))
    return found


def _vectors(family: Any) -> list[Vector]:
    """One for each set of labels beside the position."""
    parts: dict[tuple[tuple[str, str], ...], dict[int, int]] = {}
    for sample in family.samples:
        if sample.name.endswith("_total"):
            labels = {key: value for key, value in sample.labels.items() if key != POSITION}
            parts.setdefault(tuple(sorted(labels.items())), {})[int(sample.labels[POSITION])] = int(sample.value)
    return [Vector(family.name, dict(labels), [at[i] for i in sorted(at)]) for labels, at in parts.items()]


def _histograms(family: Any) -> list[Histogram]:
    """One for each set of labels."""
    parts: dict[tuple[tuple[str, str], ...], dict[str, Any]] = {}
    for sample in family.samples:
        labels = {key: value for key, value in sample.labels.items() if key != "le"}
        one = parts.setdefault(tuple(sorted(labels.items())), {"labels": labels, "buckets": {}, "count": 0, "sum": 0.0})
        if sample.name.endswith("_bucket"):
            one["buckets"][sample.labels["le"]] = int(sample.value)
        elif sample.name.endswith("_count"):
            one["count"] = int(sample.value)
        elif sample.name.endswith("_sum"):
            one["sum"] = float(sample.value)
    return [Histogram(family.name, one["labels"], one["count"], one["sum"], one["buckets"]) for one in parts.values()]
