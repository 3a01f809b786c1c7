"""Eviction: on three kinds of traces as many hits as caches written from the papers have, step for step."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from quire.kv_offload.policies import POLICIES
from quire.kv_offload.policies.base import EvictionPolicy
from tests.unit.kv_offload.simulators import arc_hits, lfu_hits, lru_hits

SIMULATORS = {"lru": lru_hits, "lfu": lfu_hits, "arc": arc_hits}
SIZE, LENGTH = 64, 6000


def zipf() -> list[int]:
    """Some pages are asked for far more often than others."""
    return np.random.default_rng(1).zipf(1.2, LENGTH).clip(max=2000).tolist()


def scans() -> list[int]:
    """Shared beginnings that come again and again, and between them long runs of pages that never come back."""
    rng, trace, fresh = np.random.default_rng(2), [], 10_000
    while len(trace) < LENGTH:
        trace += rng.integers(0, 48, 60).tolist()
        trace += range(fresh, fresh + 100)
        fresh += 100
    return trace


def loops() -> list[int]:
    """Loops that are a little longer than the cache, beside pages that are asked for now and then."""
    rng = np.random.default_rng(3)
    return [int(rng.integers(1000, 1200)) if rng.random() < 0.3 else step % 80 for step in range(LENGTH)]


TRACES: dict[str, Callable[[], list[int]]] = {"zipf": zipf, "scans": scans, "loops": loops}


def hits(policy: EvictionPolicy, trace: list[int], size: int = 1) -> int:
    num_hits, kept = 0, set()
    for page in trace:
        name = page.to_bytes(8, "little")
        assert (name in policy) is (name in kept)
        if name in policy:
            num_hits += 1
            policy.touch(name)
        else:
            kept.difference_update(policy.insert(name, size))
            kept.add(name)
        assert policy.num_bytes == size * len(policy) == size * len(kept) <= policy.budget
    return num_hits


@pytest.mark.parametrize("trace", TRACES)
@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_has_the_hits_of_its_paper(name, trace):
    pages = TRACES[trace]()
    assert hits(POLICIES[name](SIZE), pages) == SIMULATORS[name](pages, SIZE)
    assert hits(POLICIES[name](SIZE * 512), pages, size=512) == SIMULATORS[name](pages, SIZE)


def test_arc_has_more_hits_than_lru_where_there_are_scans_and_loops():
    for trace in (scans(), loops()):
        assert hits(POLICIES["arc"](SIZE), trace) > hits(POLICIES["lru"](SIZE), trace)


@pytest.mark.parametrize("name", POLICIES)
def test_sizes_that_differ_keep_within_the_budget_and_what_is_removed_is_forgotten(name):
    rng = np.random.default_rng(4)
    policy, kept = POLICIES[name](5000), {}
    for _ in range(5000):
        key, size = bytes([int(rng.integers(200))]), int(rng.integers(1, 900))
        if key in policy:
            policy.touch(key) if rng.random() < 0.7 else (policy.remove(key), kept.pop(key))
        else:
            kept[key] = size
            for gone in policy.insert(key, size):
                del kept[gone]
        assert policy.num_bytes == sum(kept.values()) <= 5000 and len(policy) == len(kept)
        assert all(one in policy for one in kept)


@pytest.mark.parametrize("name", POLICIES)
def test_what_is_larger_than_the_budget_is_not_kept_and_pushes_nothing_out(name):
    policy = POLICIES[name](10)
    assert policy.insert(b"a", 10) == []
    assert policy.insert(b"b", 11) == [b"b"] and b"a" in policy
