"""Receipts: the phases of a request are its wall time, to the microsecond."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.core.draft_stats import DraftStats
from quire.core.stats import RequestStateStats, merged_stats
from quire.server.http.timing_breakdown import PHASES, make_receipt
from tests.server.engines import ScriptedEngine, scripted_config
from tests.server.servers import RunningServer
from tests.server.test_protocol import CHAT, HELLO, events, post

POINTS = ("queued_ts", "scheduled_ts", "first_token_ts", "last_token_ts", "output_ts")
COMPLETE = "/v1/completions"


def stats(*times: float) -> RequestStateStats:
    return RequestStateStats(**dict(zip(POINTS, times, strict=False)))


def test_each_phase_ends_where_the_next_begins():
    receipt = make_receipt(100.0, stats(100.5, 101.5, 103.5, 107.5, 107.75), 108.0)
    durations = dict(zip(PHASES, (500_000, 1_000_000, 2_000_000, 4_000_000, 250_000, 250_000), strict=True))
    assert receipt.durations_us == durations and receipt.ends_us[-1] == 8_000_000


@pytest.mark.parametrize("reached", range(6), ids=PHASES)
def test_a_request_that_ends_early_spent_the_rest_in_the_phase_it_was_in(reached):
    receipt = make_receipt(10.0, stats(*(11.0, 12.0, 13.0, 14.0, 15.0)[:reached]), 20.0)
    expected = [1_000_000] * reached + [(10 - reached) * 1_000_000] + [0] * (5 - reached)
    assert list(receipt.durations_us.values()) == expected


@settings(deadline=None)
@given(
    received=st.floats(0, 1e6), times=st.lists(st.floats(0, 1e6), max_size=5), now=st.floats(0, 2e3),
)  # fmt: skip
def test_whatever_the_times_are_the_phases_add_up_exactly(received, times, now):
    receipt = make_receipt(received, stats(*times), received + now)
    durations = receipt.durations_us.values()
    assert min(durations) >= 0 and sum(durations) == receipt.ends_us[-1] == round(1e6 * (received + now - received))
    content = receipt.content()
    assert round(sum(content[f"{phase}_ms"] for phase in PHASES), 3) == content["total_ms"]


def test_several_prompts_are_one_request_from_the_first_to_the_last():
    merged = merged_stats([stats(1, 2, 3, 4, 5), stats(1.5, 1.75, 8, 9, 10), stats()])
    assert [getattr(merged, point) for point in POINTS] == [1, 1.75, 3, 9, 10]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("path", [CHAT, COMPLETE], ids=["chat", "completion"])
def test_an_answer_shows_its_receipt_when_asked_to(stream, path):
    with RunningServer(ScriptedEngine(interval_s=0.003), enable_per_request_metrics=True) as server:
        body = HELLO if path == CHAT else {"prompt": [[7] * 10, [8] * 12]}
        answer = post(server, path, {**body, "max_tokens": 8, "n": 2, "stream": stream})
        receipt = events(answer)[-1]["metrics"] if stream else answer.json()["metrics"]
    assert round(sum(receipt[f"{phase}_ms"] for phase in PHASES), 3) == receipt["total_ms"]
    assert receipt["decode_ms"] >= 7 * 3 and receipt["preemptions"] == receipt["restarts"] == 0
    assert receipt["cached_tokens"] == (5 + 6 if path == COMPLETE else len(server.engine.prompts[0]) // 2)


def test_without_the_flag_there_is_none():
    with RunningServer(ScriptedEngine()) as server:
        assert "metrics" not in post(server, CHAT, HELLO).json()
        assert not any("metrics" in event for event in events(post(server, CHAT, {**HELLO, "stream": True})))


DRAFTS = DraftStats()
DRAFTS.add(3, 2)
DRAFTS.add(2, 0)
DRAFTS.num_steps_saved = 2


def drafting(level: str, **settings: bool) -> RunningServer:
    config = scripted_config(spec_method="suffix", spec_tokens=3, per_request_spec_decode_metrics=level)
    return RunningServer(ScriptedEngine(config, drafts=DRAFTS), **settings)


def test_a_receipt_says_what_drafts_saved_where_there_may_be_some():
    with drafting("none", enable_per_request_metrics=True) as server:
        receipt = post(server, CHAT, HELLO).json()["metrics"]
    assert (receipt["drafted_tokens"], receipt["accepted_tokens"], receipt["steps_saved"]) == (5, 2, 2)
    assert "speculative_decoding" not in receipt
    with RunningServer(ScriptedEngine(), enable_per_request_metrics=True) as server:
        assert "steps_saved" not in post(server, CHAT, HELLO).json()["metrics"]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_acceptance_of_one_sequence_is_told_in_the_form_of_vllm(stream):
    with drafting("summary") as server:
        answer = post(server, CHAT, {**HELLO, "stream": stream})
        metrics = events(answer)[-1]["metrics"] if stream else answer.json()["metrics"]
        several = post(server, CHAT, {**HELLO, "n": 2}).json()["metrics"]
    assert metrics == {"speculative_decoding": DRAFTS.content(3)}
    assert metrics["speculative_decoding"]["acceptance_histogram"] == [1, 0, 1, 0]
    assert several == {"speculative_decoding": None}


def test_the_level_alone_shows_nothing_without_speculation():
    config = scripted_config(speculative_config="off", per_request_spec_decode_metrics="summary")
    with RunningServer(ScriptedEngine(config)) as server:
        assert "metrics" not in post(server, CHAT, HELLO).json()
