"""Statistics of given samples, checked exactly."""

from __future__ import annotations

import pytest

from quire.bench.records import Failure, RequestRecord
from quire.bench.summary import (
    collect,
    details_of,
    figures,
    num_good,
    parse_goodput,
    peak_concurrency,
    statistics_of,
    token_sources,
)
from quire.errors import ValidationError


def record(index: int, started_s: float, *times_s: float, tokens: int | None = None, source: str = "usage"):
    """Answered: events at `times_s` after its start, the last the end."""
    times = [started_s + time_s for time_s in times_s]
    return RequestRecord(
        index=index, due_s=started_s, dispatched_s=started_s, started_s=started_s, ended_s=times[-1],
        event_times=times, num_prompt_tokens=10, num_output_tokens=len(times) if tokens is None else tokens,
        token_source=source,
    )  # fmt: skip


def failed(index: int, kind: str, ended_s: float = 0.5):
    return RequestRecord(
        index=index, due_s=0, dispatched_s=0, started_s=0, ended_s=ended_s, failure=Failure(kind, f"it was {kind}")
    )


def test_statistics_are_those_of_the_textbook():
    values = [1.0, 2.0, 3.0, 4.0, 10.0]
    assert statistics_of("ttft", values, [50, 75, 99]) == {
        "mean_ttft_ms": 4.0, "median_ttft_ms": 3.0, "std_ttft_ms": pytest.approx(10**0.5, rel=1e-12),
        "p50_ttft_ms": 3.0, "p75_ttft_ms": 4.0, "p99_ttft_ms": pytest.approx(9.76, rel=1e-12),
    }  # fmt: skip
    assert set(statistics_of("itl", [], [99]).values()) == {None}


def test_a_run_is_summed_up_exactly():
    records = [record(0, 0.0, 0.5, 0.75, 1.0), record(1, 1.0, 0.25, 1.0, tokens=4), failed(2, "connect")]
    result = figures(records, 0.0, metrics=["tpot"], percentiles=[100], objectives={"ttft": 300.0})
    assert (result["duration"], result["completed"], result["failed"]) == (2.0, 2, 1)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (20, 7)
    assert (result["request_throughput"], result["output_throughput"]) == (1.0, 3.5)
    assert (result["total_token_throughput"], result["tokens_per_event"]) == (13.5, 1.4)
    assert result["request_goodput"] == 0.5
    assert (result["mean_tpot_ms"], result["p100_tpot_ms"]) == (250.0, 250.0)
    assert result["failures_by_kind"] == {"connect": 1}
    assert result["first_failures"] == [{"index": 2, "kind": "connect", "message": "it was connect"}]
    assert "mean_ttft_ms" not in result


def test_only_the_first_failures_are_listed_but_all_are_counted():
    records = [failed(number, "timeout" if number % 3 else "early close") for number in range(30)]
    result = figures(records, 0.0, metrics=[], percentiles=[], objectives={})
    assert result["failures_by_kind"] == {"timeout": 20, "early close": 10}
    assert [one["index"] for one in result["first_failures"]] == list(range(10))


def test_tokens_that_nobody_counted_are_unknown_not_guessed():
    records = [record(0, 0.0, 0.5, 1.0), record(1, 0.0, 0.5, 1.0, source="")]
    records[1].num_output_tokens = None
    result = figures(records, 0.0, metrics=["tpot", "ttft"], percentiles=[99], objectives={})
    assert result["token_count_source"] == "none"
    assert result["total_output_tokens"] is result["output_throughput"] is result["tokens_per_event"] is None
    assert result["request_throughput"] == 2.0 and result["mean_ttft_ms"] == 500.0
    assert collect(records[1:]).tpot == []


def test_the_source_of_counts_is_named():
    both = [record(0, 0, 1), record(1, 0, 1, source="token_ids")]
    assert token_sources(both) == "usage and token_ids" and token_sources(both[:1]) == "usage"
    assert token_sources([failed(0, "x")]) == "none"


def test_a_single_token_has_no_tpot_and_meets_any_objective_of_it():
    one = [record(0, 0.0, 0.2)]
    assert collect(one).tpot == [] and collect(one).itl == []
    assert num_good(one, {"tpot": 0.001}) == 1 and num_good(one, {"ttft": 199.0}) == 0


def test_goodput_takes_all_objectives_together():
    records = [record(0, 0, 0.1, 0.2), record(1, 0, 0.1, 0.9), record(2, 0, 0.5, 0.6), failed(3, "x")]
    assert num_good(records, parse_goodput(["ttft:200", "tpot:150", "e2el:1000"])) == 1


@pytest.mark.parametrize("pair", ["ttft", "ttft:", "ttft:-1", "ttft:inf", "itl:5", "tftt:5", ":5"])
def test_a_malformed_objective_is_refused(pair: str):
    with pytest.raises(ValidationError):
        parse_goodput([pair])


def test_most_requests_at_once_are_counted():
    assert peak_concurrency([record(0, 0, 2), record(1, 1, 2), record(2, 2, 3)]) == 2
    assert peak_concurrency([]) == 0


def test_details_keep_the_order_of_requests():
    details = details_of([record(0, 1.0, 0.5, 1.0), failed(1, "connect")], 0.5)
    assert details == {
        "start_times": [0.5, -0.5], "input_lens": [10, None], "output_lens": [2, None], "ttfts_ms": [500.0, None],
        "itls_ms": [[500.0], None], "e2els_ms": [1000.0, None], "errors": [None, "connect: it was connect"],
    }  # fmt: skip


def test_a_run_in_which_nothing_succeeded_has_figures_too():
    result = figures([failed(0, "connect")], 0.0, metrics=["itl"], percentiles=[99], objectives={"ttft": 1})
    assert result["completed"] == 0 and result["output_throughput"] is None and result["p99_itl_ms"] is None
