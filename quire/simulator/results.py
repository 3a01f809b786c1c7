"""What a simulation measured: times of each request, and how long tokens took, as clients would see it.

Filled by `replica`, merged by `fleet`. Gaps between tokens are counted in bins half a percent wide, so that a million
requests need no more memory than ten.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from quire.core.stats import SchedulerStats

BIN = math.log(1.005)
LEAST_S = 1e-6
NUM_BINS = 5600
PERCENTILES = (50, 90, 95, 99)


class ItlHistogram:
    """How many gaps there were of each length."""

    def __init__(self) -> None:
        self._counts = np.zeros(NUM_BINS, dtype=np.int64)
        self._longest = 0.0
        self._sum = 0.0

    def add(self, gaps_s: np.ndarray) -> None:
        """Count gaps, [n] seconds."""
        if not len(gaps_s):
            return
        if gaps_s.min() == gaps_s.max():  # nearly all steps: all of them had a token in the step before
            place = int(math.log(max(float(gaps_s[0]), LEAST_S) / LEAST_S) / BIN)
            self._counts[min(place, NUM_BINS - 1)] += len(gaps_s)
        else:
            bins = (np.log(np.maximum(gaps_s, LEAST_S) / LEAST_S) / BIN).astype(np.int64)
            np.add.at(self._counts, np.minimum(bins, NUM_BINS - 1), 1)
        self._longest = max(self._longest, float(gaps_s.max()))
        self._sum += float(gaps_s.sum())

    def merge(self, other: ItlHistogram) -> None:
        """Add another's."""
        self._counts += other._counts
        self._longest = max(self._longest, other._longest)
        self._sum += other._sum

    def percentile(self, percent: float) -> float | None:
        """Seconds, off by half a percent at most; None = there was none."""
        total = int(self._counts.sum())
        if not total:
            return None
        place = int(np.searchsorted(np.cumsum(self._counts), max(1, math.ceil(total * percent / 100))))
        return min(self._longest, LEAST_S * math.exp((place + 0.5) * BIN))

    def mean(self) -> float | None:
        """Seconds; None = there was none."""
        total = int(self._counts.sum())
        return self._sum / total if total else None


class Results:
    """Of `capacity` requests, by number; times in seconds, NaN = not yet.

    Attributes:
        sent_s, first_s, last_s, ended_s: when each was sent, its first and newest token came, and it ended.
        num_tokens: that came.
        refusals: number -> why it cannot run.
    """

    def __init__(self, capacity: int) -> None:
        self.sent_s = np.full(capacity, np.nan)
        self.first_s = np.full(capacity, np.nan)
        self.last_s = np.full(capacity, np.nan)
        self.ended_s = np.full(capacity, np.nan)
        self.num_tokens = np.zeros(capacity, dtype=np.int64)
        self.num_prompt_tokens = np.zeros(capacity, dtype=np.int64)
        self.refusals: dict[int, str] = {}
        self.gaps = ItlHistogram()
        self.num_steps = 0
        self.num_step_tokens = 0
        self.num_preemptions = 0
        self.num_prefix_queries = 0
        self.num_prefix_hits = 0
        self.usage_sum = 0.0

    def sent(self, number: int, time_s: float, num_prompt_tokens: int) -> None:
        """A client sent a request."""
        self.sent_s[number] = time_s
        self.num_prompt_tokens[number] = num_prompt_tokens

    def refused(self, number: int, reason: str) -> None:
        """The scheduler did not take it."""
        self.refusals[number] = reason

    def delivered(self, numbers: np.ndarray, time_s: float, num_tokens: np.ndarray | int = 1) -> None:
        """So many tokens of each of these distinct requests came, together: one gap between what a client sees."""
        if not len(numbers):
            return
        last = self.last_s[numbers]
        is_first = np.isnan(last)
        if is_first.any():
            self.first_s[numbers[is_first]] = time_s
            last = last[~is_first]
        self.gaps.add(time_s - last)
        self.last_s[numbers] = time_s
        self.num_tokens[numbers] += num_tokens

    def finished(self, number: int, time_s: float) -> None:
        """A request ended."""
        self.ended_s[number] = time_s

    def stepped(self, stats: SchedulerStats, num_tokens: int) -> None:
        """A step was run."""
        self.num_steps += 1
        self.num_step_tokens += num_tokens
        self.num_preemptions += stats.num_preemptions
        self.num_prefix_queries += stats.prefix_cache_queries
        self.num_prefix_hits += stats.prefix_cache_hits
        self.usage_sum += stats.kv_cache_usage

    def merge(self, other: Results, numbers: Sequence[int] | None = None) -> None:
        """Add what another replica measured.

        Args:
            numbers: its requests' numbers here, in the order of its own; None = they are the same.
        """
        theirs = np.flatnonzero(~np.isnan(other.sent_s))
        ours = theirs if numbers is None else np.asarray(numbers)[theirs]
        for name in ("sent_s", "first_s", "last_s", "ended_s", "num_tokens", "num_prompt_tokens"):
            getattr(self, name)[ours] = getattr(other, name)[theirs]
        self.refusals.update({n if numbers is None else numbers[n]: why for n, why in other.refusals.items()})
        self.gaps.merge(other.gaps)
        for name in ("num_steps", "num_step_tokens", "num_preemptions", "num_prefix_queries", "num_prefix_hits"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.usage_sum += other.usage_sum

    @property
    def ttft_s(self) -> np.ndarray:
        """[num_answered] seconds to the first token."""
        ttft: np.ndarray = (self.first_s - self.sent_s)[~np.isnan(self.ended_s)]
        return ttft

    @property
    def tpot_s(self) -> np.ndarray:
        """[num_answered] mean seconds between a request's tokens; 0 for a single token."""
        done = ~np.isnan(self.ended_s)
        tpot: np.ndarray = (self.last_s[done] - self.first_s[done]) / np.maximum(self.num_tokens[done] - 1, 1)
        return tpot

    @property
    def e2e_s(self) -> np.ndarray:
        """[num_answered] seconds to the end."""
        e2e: np.ndarray = (self.ended_s - self.sent_s)[~np.isnan(self.ended_s)]
        return e2e

    def is_good(self, slo: Slo) -> np.ndarray:
        """[num_answered] bool: which kept to the objectives."""
        good: np.ndarray = (self.ttft_s <= slo.ttft_s) & (self.tpot_s <= slo.itl_s) & (self.e2e_s <= slo.e2e_s)
        return good


class Slo:
    """Objectives for each request, in seconds: first token, mean gap between its tokens, end."""

    def __init__(self, ttft_s: float = math.inf, itl_s: float = math.inf, e2e_s: float = math.inf) -> None:
        self.ttft_s = ttft_s
        self.itl_s = itl_s
        self.e2e_s = e2e_s


def figures(results: Results, slo: Slo) -> dict[str, Any]:
    """The figures of a simulation; times in milliseconds, rates per second of its duration."""
    num_answered = len(results.ttft_s)
    sent = results.sent_s[~np.isnan(results.sent_s)]
    start = float(sent.min()) if len(sent) else 0.0
    seconds = float(np.nanmax(results.ended_s)) - start if num_answered else 0.0
    per_s = 1 / seconds if seconds > 0 else 0.0
    good = results.is_good(slo)
    return {
        "num_requests": len(sent),
        "num_answered": num_answered,
        "num_refused": len(results.refusals),
        "seconds": seconds,
        "request_throughput": num_answered * per_s,
        "output_throughput": float(results.num_tokens.sum()) * per_s,
        "total_throughput": float(results.num_tokens.sum() + results.num_prompt_tokens.sum()) * per_s,
        "goodput": float(good.sum()) * per_s,
        "good_share": float(good.mean()) if num_answered else 0.0,
        "num_steps": results.num_steps,
        "mean_step_tokens": results.num_step_tokens / max(1, results.num_steps),
        "mean_kv_cache_usage": results.usage_sum / max(1, results.num_steps),
        "num_preemptions": results.num_preemptions,
        "prefix_hit_rate": results.num_prefix_hits / max(1, results.num_prefix_queries),
        **spread("ttft", results.ttft_s),
        **spread("tpot", results.tpot_s),
        **spread("e2e", results.e2e_s),
        "mean_itl_ms": _ms(results.gaps.mean()),
        **{f"p{percent}_itl_ms": _ms(results.gaps.percentile(percent)) for percent in PERCENTILES},
    }


def spread(name: str, seconds: np.ndarray, percentiles: Sequence[int] = PERCENTILES) -> Mapping[str, float | None]:
    """Mean and percentiles in milliseconds; None where there is nothing."""
    if not len(seconds):
        return {f"mean_{name}_ms": None, **{f"p{percent}_{name}_ms": None for percent in percentiles}}
    found = np.percentile(seconds, percentiles)
    return {
        f"mean_{name}_ms": 1e3 * float(seconds.mean()),
        **{f"p{percent}_{name}_ms": 1e3 * float(one) for percent, one in zip(percentiles, found, strict=True)},
    }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1e3 * seconds
