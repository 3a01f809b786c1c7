"""Simulated loads against numbers that can be worked out by hand."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from quire.errors import ConfigError, ValidationError
from quire.simulator.costs import StepShape
from quire.simulator.fleet import FleetSetup, simulate
from quire.simulator.results import ItlHistogram, Slo, figures
from quire.simulator.search import compare_routing, replicas_needed, sweep
from quire.simulator.workload import Lengths, SimRequest, SyntheticLoad, read_trace, stream_tokens
from tests.unit.scheduler.harness import make_setup


class EvenCosts:
    """Each step takes as long as it is told, and so much more for each token."""

    def __init__(
        self,
        step_s: float = 0.1,
        token_s: float = 0.0,
        request_s: float = 0.0,
        request_each_s: float = 0.0,
        delivery_s: float = 0.0,
    ) -> None:
        self.step_s = step_s
        self.token_s = token_s
        self.request_s = request_s
        self.request_each_s = request_each_s
        self.delivery_s = delivery_s

    def step_seconds(self, shape: StepShape) -> float:
        return self.step_s + self.token_s * shape.num_tokens

    def gap_seconds(self, shape: StepShape) -> float:
        return 0.0

    def delivery_seconds(self, num_tokens: int) -> float:
        return self.delivery_s


def fleet(num_replicas: int = 1, costs: EvenCosts | None = None, **settings: object) -> FleetSetup:
    settings = {
        "num_blocks": 1000,
        "block_size": 16,
        "max_model_len": 2000,
        "max_num_seqs": 8,
        "budget": 512,
        **settings,
    }
    return FleetSetup(scheduler=make_setup(**settings), costs=_Same(costs or EvenCosts()), num_replicas=num_replicas)


class _Same:
    """A cost model for each replica, the same."""

    def __init__(self, costs: EvenCosts) -> None:
        self.costs = costs

    def __call__(self) -> EvenCosts:
        return self.costs


def request(arrival_s: float, prompt_len: int = 10, output_len: int = 5, stream: int = 0, **more: object) -> SimRequest:
    return SimRequest(arrival_s=arrival_s, prompt_len=prompt_len, output_len=output_len, stream=stream, **more)


def poisson(rate: float, count: int = 150, **more: object) -> list[SimRequest]:
    lengths = {"prompts": Lengths(mean=50, spread=0.5), "outputs": Lengths(mean=20, spread=0.5)}
    return SyntheticLoad(num_requests=count, rate=rate, max_model_len=2000, **{**lengths, **more}).make()


def test_one_request_takes_its_steps_and_what_is_around_them():
    results = simulate(fleet(costs=EvenCosts(0.1, 0.01, request_s=0.5, delivery_s=0.25)), [request(2.0)])
    # Ten prompt tokens and four single ones, 0.1 s a step and 0.01 s a token.
    assert results.ttft_s == pytest.approx([0.5 + 0.2 + 0.25])
    assert results.e2e_s == pytest.approx([0.5 + 0.2 + 4 * 0.11 + 0.25])
    assert results.tpot_s == pytest.approx([0.11])
    assert results.num_tokens.tolist() == [5]


@pytest.mark.parametrize(("routing", "ends"), [("round-robin", [0.1, 0.1, 0.2]), ("data-parallel", [0.1, 0.11, 0.2])])
def test_requests_that_come_at_once_are_taken_in_one_after_the_other(routing: str, ends: list[float]):
    """By one front end of all replicas, or by each replica's own."""
    costs = EvenCosts(0.1, request_each_s=0.01)
    setup = dataclasses.replace(fleet(2, costs), routing=routing)
    results = simulate(setup, [request(0.0, output_len=1, stream=n) for n in range(3)])
    assert results.first_s == pytest.approx(ends)


def test_a_request_that_comes_during_a_step_waits_for_its_end():
    results = simulate(fleet(), [request(0.0), request(0.13, stream=1)])
    assert results.first_s == pytest.approx([0.1, 0.3])
    assert results.ended_s == pytest.approx([0.5, 0.7])


def test_requests_beyond_the_rows_wait_for_one():
    results = simulate(fleet(max_num_seqs=1), [request(0.0, stream=n) for n in range(3)])
    assert results.ended_s == pytest.approx([0.5, 1.0, 1.5])


def test_the_next_turn_finds_the_whole_conversation_in_the_cache():
    first = request(0.0, prompt_len=160, output_len=33, stream=7)
    second = request(50.0, prompt_len=160 + 33 + 10, output_len=2, stream=7)
    results = simulate(fleet(), [first, second])
    assert results.num_prefix_hits == 192
    assert results.num_prefix_queries == 160 + 203


def test_a_shared_prefix_is_shared_by_its_streams_alone():
    requests = [request(10.0 * n, prompt_len=100, stream=n, prefix=n % 2, prefix_len=64) for n in range(4)]
    assert simulate(fleet(), requests).num_prefix_hits == 2 * 64


def test_more_load_means_longer_waits_and_no_more_goodput_share():
    costs = EvenCosts(0.02, 0.0005)
    found = [figures(simulate(fleet(costs=costs), poisson(rate)), Slo(0.5, 0.06)) for rate in (1, 5, 12, 40)]
    waits = [one["p95_ttft_ms"] for one in found]
    shares = [one["good_share"] for one in found]
    assert waits == sorted(waits) and waits[0] < waits[-1] / 5
    assert shares == sorted(shares, reverse=True) and shares[0] == 1.0 > shares[-1]
    assert all(one["num_answered"] == 150 for one in found)


def test_pages_that_do_not_hold_all_mean_preemptions():
    scarce = figures(simulate(fleet(num_blocks=30), poisson(10, count=60)), Slo())
    assert scarce["num_preemptions"] > 0 == figures(simulate(fleet(), poisson(10, count=60)), Slo())["num_preemptions"]


def test_a_request_that_can_never_run_is_counted_as_refused():
    found = figures(simulate(fleet(num_blocks=5), [request(0.0, 200), request(0.0, stream=1)]), Slo())
    assert (found["num_refused"], found["num_answered"]) == (1, 1)


def test_replicas_in_processes_give_what_one_process_gives():
    setup = fleet(num_replicas=3, costs=EvenCosts(0.02))
    requests = poisson(30, count=120)
    one = figures(simulate(setup, requests), Slo())
    assert figures(simulate(dataclasses.replace(setup, num_processes=2), requests), Slo()) == pytest.approx(one)


def test_more_replicas_are_found_as_far_as_they_are_needed():
    requests = poisson(40, count=150)
    needed, trials = replicas_needed(fleet(costs=EvenCosts(0.05)), requests, Slo(0.3), 0.9)
    assert needed is not None and needed > 1
    by_name = {trial.name: trial.figures["good_share"] for trial in trials}
    assert by_name[f"{needed} replicas"] >= 0.9 > by_name[f"{needed - 1} replicas"]


def test_no_number_of_replicas_makes_a_step_faster():
    needed, _ = replicas_needed(fleet(costs=EvenCosts(0.05)), poisson(5, count=50), Slo(0.01), 0.9)
    assert needed is None


def test_a_sweep_names_the_setting_that_was_wrong():
    setup = fleet(costs=EvenCosts(0.05), max_num_seqs=2, max_decode_slowdown=2.0)
    best = sweep(setup, poisson(8, count=50), Slo(0.5))[0]
    assert best.name == "max_num_seqs=8"


def test_a_prefix_aware_router_finds_more_in_the_caches_than_others():
    load = poisson(20, count=150, prefix_len=256, num_prefixes=12)
    setup = fleet(num_replicas=4, costs=EvenCosts(0.02), num_blocks=120)
    hits = {trial.name: trial.figures["prefix_hit_rate"] for trial in compare_routing(setup, load, Slo())}
    assert min(hits["prefix-aware"], hits["data-parallel"]) > hits["round-robin"] + 0.1
    with pytest.raises(ConfigError, match="did you mean 'least-loaded'"):
        simulate(dataclasses.replace(setup, routing="least-load"), load)


def test_gaps_in_bins_have_percentiles_within_a_percent():
    rng = np.random.default_rng(0)
    gaps = rng.lognormal(-4, 1, 20_000)
    counts, other = ItlHistogram(), ItlHistogram()
    counts.add(gaps[:5000])
    other.add(gaps[5000:])
    counts.merge(other)
    for percent in (1, 50, 95, 99.9):
        assert counts.percentile(percent) == pytest.approx(np.percentile(gaps, percent), rel=0.01)
    assert counts.mean() == pytest.approx(gaps.mean())
    assert counts.percentile(100) == gaps.max()


def test_the_same_seed_makes_the_same_load_and_its_rate_is_as_asked():
    load = poisson(25, count=2000, turns=4, think_s=1.0)
    assert load == poisson(25, count=2000, turns=4, think_s=1.0)
    assert load[-1].arrival_s == pytest.approx(2000 / 25, rel=0.2)
    assert [one.arrival_s for one in load] == sorted(one.arrival_s for one in load)
    turns = [one for one in load if one.stream == 3]
    assert all(a.prompt_len + a.output_len < b.prompt_len for a, b in zip(turns, turns[1:], strict=False))
    assert np.array_equal(turns[1].prompt()[: turns[0].prompt_len], turns[0].prompt())


def test_streams_differ_and_positions_too():
    assert (stream_tokens(1, np.arange(50)) != stream_tokens(2, np.arange(50))).all()
    assert len(set(stream_tokens(1, np.arange(1000)).tolist())) > 900


def test_a_trace_is_read_by_arrival_and_its_mistakes_are_named(tmp_path):
    path = tmp_path / "trace.jsonl"
    lines = [
        {"arrival_s": 3, "prompt_tokens": [5, 6, 7], "output_tokens": 2},
        {"arrival_s": 1.5, "prompt_tokens": 40, "output_tokens": 3, "session": "a", "priority": -1},
    ]
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n\n")
    first, second = read_trace(path)
    assert (first.prompt_len, first.priority, len(first.prompt())) == (40, -1, 40)
    assert second.prompt().tolist() == [5, 6, 7]
    for text, what in (
        ("nonsense", "line 1 is not JSON"),
        ("[1]", "line 1 is"),
        ('{"arrival_s": 0, "prompt_tokens": 0, "output_tokens": 1}', "prompt_tokens is 0"),
        ('{"arrival_s": 0, "prompt_tokens": 5}', "output_tokens is None"),
        ("", "holds no requests"),
    ):
        path.write_text(text)
        with pytest.raises(ValidationError, match=what):
            read_trace(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(tmp_path / "missing")
