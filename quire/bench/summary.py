"""Figures of a run from its records. Pure functions.

Of answered requests: TTFT is from sending to the first event with tokens; E2EL to the last event of the answer; TPOT is
(E2EL - TTFT) / (tokens - 1); ITL is the time between two events with tokens. All in milliseconds.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from quire.bench.records import RequestRecord
from quire.errors import ValidationError, unknown_name

METRICS = ("ttft", "tpot", "itl", "e2el")
GOODPUT_METRICS = ("ttft", "tpot", "e2el")
TITLES = {
    "ttft": "Time to first token", "tpot": "Time per output token after the first",
    "itl": "Time between events with tokens", "e2el": "End-to-end latency",
}  # fmt: skip
MAX_SHOWN_FAILURES = 10


@dataclass(frozen=True, slots=True)
class Samples:
    """Measured times, in milliseconds, in the order of the requests.

    Attributes:
        tpot: of answers with at least two tokens whose server counts them.
    """

    ttft: list[float]
    tpot: list[float]
    itl: list[float]
    e2el: list[float]

    def of(self, metric: str) -> list[float]:
        """By the name of a metric."""
        values: list[float] = getattr(self, metric)
        return values


def answered(records: Sequence[RequestRecord]) -> list[RequestRecord]:
    """Those that got a complete answer."""
    return [record for record in records if record.failure is None]


def ttft_ms(record: RequestRecord) -> float:
    """Of an answered request."""
    return 1e3 * (record.event_times[0] - record.started_s)


def e2el_ms(record: RequestRecord) -> float:
    """Of an answered request."""
    return 1e3 * (record.ended_s - record.started_s)


def tpot_ms(record: RequestRecord) -> float | None:
    """Of an answered request; None = fewer than two tokens, or they were not counted."""
    count = record.num_output_tokens
    if count is None or count < 2:
        return None
    return 1e3 * (record.ended_s - record.event_times[0]) / (count - 1)


def itls_ms(record: RequestRecord) -> list[float]:
    """Of an answered request."""
    times = record.event_times
    return [1e3 * (after - before) for before, after in itertools.pairwise(times)]


def collect(records: Sequence[RequestRecord]) -> Samples:
    """The samples of the answered requests among `records`."""
    done = answered(records)
    tpots = [tpot_ms(record) for record in done]
    return Samples(
        ttft=[ttft_ms(record) for record in done],
        tpot=[tpot for tpot in tpots if tpot is not None],
        itl=[itl for record in done for itl in itls_ms(record)],
        e2el=[e2el_ms(record) for record in done],
    )


def statistics_of(metric: str, values: Sequence[float], percentiles: Sequence[float]) -> dict[str, float | None]:
    """Mean, median, standard deviation (of the population) and percentiles (linear); None where there is no value."""
    names = [f"mean_{metric}_ms", f"median_{metric}_ms", f"std_{metric}_ms"]
    names += [f"p{percentile:g}_{metric}_ms" for percentile in percentiles]
    if not values:
        return dict.fromkeys(names)
    array = np.asarray(values)
    figures = [array.mean(), np.median(array), array.std(), *np.percentile(array, list(percentiles))]
    return {name: float(figure) for name, figure in zip(names, figures, strict=True)}


def parse_goodput(pairs: Sequence[str]) -> dict[str, float]:
    """Milliseconds by metric, of texts like "ttft:200".

    Raises:
        ValidationError: one is malformed.
    """
    objectives: dict[str, float] = {}
    for pair in pairs:
        name, _, text = pair.partition(":")
        if name not in GOODPUT_METRICS:
            raise unknown_name("goodput metric", name, GOODPUT_METRICS, ValidationError)
        try:
            limit = float(text)
        except ValueError:
            limit = -1.0
        if not 0 < limit < float("inf"):
            raise ValidationError(
                f"--goodput {pair}: {text!r} is not a number of milliseconds", hint="for example ttft:200 tpot:20",
                field="goodput",
            )  # fmt: skip
        objectives[name] = limit
    return objectives


def num_good(records: Sequence[RequestRecord], objectives: Mapping[str, float]) -> int:
    """Answered requests that met every objective; one without a TPOT (a single token) meets that."""
    count = 0
    for record in answered(records):
        values = {"ttft": ttft_ms(record), "tpot": tpot_ms(record), "e2el": e2el_ms(record)}
        count += all(values[name] is None or values[name] <= limit for name, limit in objectives.items())  # type: ignore[operator]
    return count


def token_sources(records: Sequence[RequestRecord]) -> str:
    """Who counted the output tokens: "usage", "token_ids", both joined by "and", or "none" when an answer lacks it."""
    sources = {record.token_source for record in answered(records)}
    return "none" if "" in sources or not sources else " and ".join(sorted(sources, reverse=True))


def peak_concurrency(records: Sequence[RequestRecord]) -> int:
    """Most requests that were under way at once."""
    edges = sorted(edge for one in records for edge in ((one.started_s, 1), (one.ended_s, -1)))
    running = peak = 0
    for _, change in edges:
        running += change
        peak = max(peak, running)
    return peak


def failures_of(records: Sequence[RequestRecord]) -> dict[str, Any]:
    """Failed requests: how many, by kind, and the first ones."""
    failed = [(record.index, record.failure) for record in records if record.failure is not None]
    return {
        "failed": len(failed),
        "failures_by_kind": dict(Counter(failure.kind for _, failure in failed).most_common()),
        "first_failures": [
            {"index": index, "kind": failure.kind, "message": failure.message}
            for index, failure in failed[:MAX_SHOWN_FAILURES]
        ],
    }


def figures(
    records: Sequence[RequestRecord],
    start_s: float,
    *,
    metrics: Sequence[str],
    percentiles: Sequence[float],
    objectives: Mapping[str, float],
) -> dict[str, Any]:
    """The measured part of a result. Figures that need a count of tokens are None when they were not counted.

    Args:
        start_s: of the run; it lasts to the end of the last request.
    """
    done = answered(records)
    duration = max((record.ended_s for record in records), default=start_s) - start_s
    per_second = 1 / duration if duration > 0 else 0.0
    inputs, outputs = _total(done, "num_prompt_tokens"), _total(done, "num_output_tokens")
    both = None if inputs is None or outputs is None else inputs + outputs
    samples = collect(records)
    num_events = sum(len(record.event_times) for record in done)
    result: dict[str, Any] = {
        "duration": duration,
        "completed": len(done),
        **failures_of(records),
        "token_count_source": token_sources(records),
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "tokens_per_event": None if outputs is None or not num_events else outputs / num_events,
        "request_throughput": len(done) * per_second,
        "output_throughput": None if outputs is None else outputs * per_second,
        "total_token_throughput": None if both is None else both * per_second,
        "request_goodput": num_good(records, objectives) * per_second if objectives else None,
        "max_concurrent_requests": peak_concurrency(records),
    }
    for metric in metrics:
        result.update(statistics_of(metric, samples.of(metric), percentiles))
    return result


def _total(records: Sequence[RequestRecord], name: str) -> int | None:
    counts = [getattr(record, name) for record in records]
    return None if None in counts or not counts else sum(counts)


def details_of(records: Sequence[RequestRecord], start_s: float) -> dict[str, list[Any]]:
    """A list for each per-request figure, all in the order of the requests; None where a request failed."""
    done = [record if record.failure is None else None for record in records]
    return {
        "start_times": [record.started_s - start_s for record in records],
        "input_lens": [one and one.num_prompt_tokens for one in done],
        "output_lens": [one and one.num_output_tokens for one in done],
        "ttfts_ms": [one and ttft_ms(one) for one in done],
        "itls_ms": [one and itls_ms(one) for one in done],
        "e2els_ms": [one and e2el_ms(one) for one in done],
        "errors": [None if one.failure is None else f"{one.failure.kind}: {one.failure.message}" for one in records],
    }
