"""The controller on a simulated machine: never slower than plain decoding, and near the best where drafts are good."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import numpy as np
import pytest

from quire.core.drafts import SpeculatedStep, StepLoad
from quire.core.speculation_stats import Reason
from quire.spec_decode.controller import SpeculationController
from quire.spec_decode.cost_table import CostTable, MeasuredStep
from quire.spec_decode.load import bucket_of
from tests.unit.spec_decode.simulated_machine import COSTS, NO_DRAFTS, Drafter, fixed_ratio, linear, play, staircase

ROWS: dict[str, Callable[[int], int]] = {
    "1": lambda step: 1,
    "256": lambda step: 256,
    "changing": lambda step: 1 + (37 * (step // 50)) % 256,
}


def right_then_wrong(step: int) -> float:
    return 0.95 if step < 300 else 0.0


def in_turns(step: int) -> float:
    return 0.9 if step // 40 % 2 else 0.0


ADVERSARIES = {
    "all wrong": Drafter(lambda step: 0.0, score=1.0),
    "all wrong and expensive": Drafter(lambda step: 0.0, score=1.0, seconds=0.02),
    "right, then wrong": Drafter(right_then_wrong, score=1.0, seconds=0.0005),
    "right in turns": Drafter(in_turns, score=1.0),
    "few, wrong, expensive": Drafter(lambda step: 0.1, score=0.9, share=0.1, seconds=0.003),
    "right and too expensive": Drafter(lambda step: 0.9, seconds=0.03),
    "never any": Drafter(lambda step: 0.5, share=0.0, seconds=0.0004),
}


@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("adversary", ADVERSARIES)
def test_no_proposer_makes_it_slower(adversary: str, cost: str):
    for rows in ROWS.values():
        played = play(
            SpeculationController(), ADVERSARIES[adversary], COSTS[cost], num_rows=rows, num_steps=600, noise=0.05
        )
        assert played.ratio >= 0.98


@pytest.mark.parametrize("num_rows", [1, 16, 256])
@pytest.mark.parametrize(("cost", "chance"), [("flat", 0.6), ("linear", 0.9), ("steep", 0.9), ("convex", 0.6)])
def test_good_proposers_come_near_the_best_fixed_budget(cost: str, chance: float, num_rows: int):
    drafter = Drafter(lambda step: chance, length=16)
    best = max(fixed_ratio(drafter, COSTS[cost], num_rows, number) for number in (0, 1, 2, 4, 8, 16))
    found = play(
        SpeculationController(), drafter, COSTS[cost], num_rows=lambda step: num_rows, num_steps=600, noise=0.05
    )
    assert found.ratio >= 0.8 * best


def begun(cost: Callable[[int], float]) -> SpeculationController:
    """A controller that was given what steps of one and of four rows take at start."""
    controller = SpeculationController()
    controller.begin(
        [
            MeasuredStep(rows, rows * most, cost(rows + rows * most))
            for rows in (1, 4)
            for most in (0, 1, 2, 4, 8, 16, 32)
        ]
    )
    return controller


def test_where_steps_measured_at_start_say_that_drafts_do_not_pay_none_are_tried():
    drafter = Drafter(lambda step: 0.9, length=24)
    informed, other = (
        play(controller, drafter, staircase, num_rows=lambda step: 4, num_steps=40, noise=0.05)
        for controller in (begun(staircase), SpeculationController())
    )
    assert informed.num_drafted == 0 < other.num_drafted
    assert informed.ratio > 0.98 and informed.ratio > other.ratio


def test_costs_of_more_drafts_are_taken_for_lower_where_fewer_cost_less_than_expected():
    drafter = Drafter(lambda step: 0.9, length=24)
    best = max(fixed_ratio(drafter, COSTS["flat"], 4, number) for number in (4, 8, 16, 24))
    played = play(SpeculationController(), drafter, COSTS["flat"], num_rows=lambda step: 4, num_steps=600, noise=0.05)
    assert played.ratio >= 0.9 * best


def test_a_first_trial_that_is_interrupted_counts_for_twice_what_was_foreseen():
    costs, bucket = CostTable(), bucket_of(1, 0, 100)
    costs.begin([MeasuredStep(1, number, linear(1 + number)) for number in (0, 4, 16)])
    costs.record(bucket, 1, 0, 0, linear(1))
    costs.record(bucket, 1, 0, 4, 1.0)
    assert costs.decode_seconds(bucket, 1, (4,))[1] == pytest.approx(2 * linear(5))


@pytest.mark.parametrize(("believed", "cost"), [("flat", "steep"), ("steep", "flat"), ("staircase", "convex")])
def test_real_steps_correct_what_was_measured_at_start(believed: str, cost: str):
    for adversary in ADVERSARIES.values():
        assert play(begun(COSTS[believed]), adversary, COSTS[cost], num_steps=600, noise=0.05).ratio >= 0.98
    drafter = Drafter(lambda step: 0.9, length=16)
    best = max(fixed_ratio(drafter, COSTS[cost], 1, number) for number in (0, 1, 2, 4, 8, 16))
    assert play(begun(COSTS[believed]), drafter, COSTS[cost], num_steps=600, noise=0.05).ratio >= 0.8 * best


def test_a_step_that_was_interrupted_at_start_is_no_measure():
    measured = [MeasuredStep(1, number, linear(1 + number)) for number in (0, 4, 16)]
    costs, disturbed = CostTable(), CostTable()
    costs.begin(measured)
    disturbed.begin([*measured, MeasuredStep(1, 4, 0.5), MeasuredStep(1, 0, 0.5)])
    bucket, numbers = bucket_of(1, 0, 100), (1, 4, 10, 16, 32)
    assert disturbed.decode_seconds(bucket, 1, numbers) == costs.decode_seconds(bucket, 1, numbers)
    scale = linear(1) / costs.decode_seconds(bucket, 1, ())[0]
    assert [scale * step_s for step_s in costs.decode_seconds(bucket, 1, (4, 10, 32))[1:]] == pytest.approx(
        [linear(5), linear(11), linear(33)]
    )


def test_costs_with_steps_are_found_out():
    drafter = Drafter(lambda step: 0.95, length=16)
    best = max(fixed_ratio(drafter, staircase, 1, number) for number in (1, 2, 3, 4, 8))
    assert play(SpeculationController(), drafter, staircase, num_steps=500, noise=0.05).ratio >= 0.9 * best


def test_drafts_that_become_good_are_found_to_be():
    drafter = Drafter(lambda step: 0.0 if step < 500 else 0.9, score=0.9)
    played = play(SpeculationController(), drafter, linear, num_steps=2000, noise=0.05)
    assert played.ratio > 2.0


@pytest.mark.parametrize(("chance", "least"), [(0.35, 0.985), (0.5, 1.01)])
def test_small_gains_are_taken_and_losses_avoided_on_a_machine_that_changes_its_speed(chance: float, least: float):
    """Steps take now 1.0, now 1.4 of what they do, as on a machine that others use, too."""
    drafter = Drafter(lambda step: chance, score=0.6, length=8, seconds=0.0003)
    ratios = [
        play(
            SpeculationController(), drafter, lambda num_tokens: 0.002 * (1.0 + 0.12 * num_tokens), num_steps=3000,
            num_rows=lambda step: 4, noise=0.1, slowness=lambda step: 1.4 if step // 100 % 2 else 1.0, seed=seed,
        ).ratio
        for seed in range(8)
    ]  # fmt: skip
    assert statistics.mean(ratios) > least and min(ratios) > 0.98


def test_plain_steps_that_were_not_asked_about_say_what_drafts_must_beat():
    controller = SpeculationController()
    play(controller, Drafter(lambda step: 0.0), linear, num_steps=300)
    before = controller.stats().buckets
    play(controller, Drafter(lambda step: 0.0), linear, num_steps=300, slowness=lambda step: 2.0)
    assert controller._costs.plain_seconds(bucket_of(1, 0, 100), 1, 0) > 1.9 * linear(1)
    assert [bucket.is_closed for bucket in controller.stats().buckets] == [True] == [one.is_closed for one in before]


def test_looks_at_many_rows_do_not_delay_those_at_a_few():
    """The next look at 64 rows would come after seconds; drafts of one row have become good meanwhile."""
    drafter = Drafter(lambda step: 0.0 if step < 1500 else 0.95, score=0.9, seconds=0.002)
    played = play(
        SpeculationController(), drafter, lambda num_tokens: 0.001 * (1.0 + 0.05 * num_tokens), num_steps=3000,
        num_rows=lambda step: 64 if 500 <= step < 1500 else 1, noise=0.05,
    )  # fmt: skip
    assert played.num_drafted > 700


def test_the_same_measurements_give_the_same_decisions():
    one, other = SpeculationController(), SpeculationController()
    for controller in (one, other):
        play(controller, ADVERSARIES["right in turns"], linear, num_steps=400, noise=0.05)
    assert one.stats() == other.stats()


def test_every_step_has_a_reason():
    controller = SpeculationController()
    drafter = Drafter(lambda step: 0.9, share=0.5)
    played = play(controller, drafter, linear, num_steps=1000, num_rows=lambda step: 2)
    reasons = controller.stats().reasons
    assert sum(reasons.values()) == played.num_steps
    assert reasons[Reason.DRAFTED] + reasons[Reason.PROBE] == played.num_drafted > 500
    assert 10 <= reasons[Reason.CONTROL] <= 40 and reasons[Reason.NO_PROPOSALS] > 150


def test_no_row_gets_more_drafts_than_asked_for_nor_the_step_more_than_fit():
    controller, rng = SpeculationController(most_drafts=3), np.random.default_rng(0)
    drafter = Drafter(lambda step: 0.99)
    load = StepLoad(num_decoding=4, num_other_tokens=0, sum_seq_lens=400, max_seq_len=100, num_left=5)
    for step in range(200):
        most = controller.most_tokens(4, 0, 100)
        assert most <= 3
        proposals, kept = None, NO_DRAFTS
        if most:
            proposals = drafter.propose(step, 4, most, rng)
            kept = controller.choose(load, proposals)
            assert kept.sum() <= 5 and (kept <= proposals.counts).all()
        elif controller.num_watched():
            looked = drafter.propose(step, 4, controller.num_watched(), rng)
            controller.observe(load, looked, looked.counts)
        controller.record(
            SpeculatedStep(load=load, proposals=proposals, kept=kept, accepted=kept, seconds=0.01, proposing_s=0.0)
        )
    assert controller.stats().buckets[0].ratio > 1.5
