"""Drafts that are only looked at: what they promise, how often there are looks, and trials that follow from them."""

from __future__ import annotations

import numpy as np
import pytest

from quire.core.drafts import Proposals
from quire.core.speculation_stats import Reason
from quire.spec_decode.controller import SpeculationController
from quire.spec_decode.draft_budget import common_budgets
from quire.spec_decode.draft_watch import (
    BEARABLE,
    ENOUGH,
    ENOUGH_WITHOUT,
    HOPELESS_SHARE,
    PLANNING_S,
    WATCHED_SHARE,
    DraftWatch,
)
from quire.spec_decode.guard import DraftGuard, Promise
from quire.spec_decode.load import bucket_of
from quire.spec_decode.survival import FEW, Survival
from tests.unit.spec_decode.simulated_machine import Drafter, linear, play
from tests.unit.spec_decode.test_estimates import make_proposals


def test_an_estimate_takes_some_looks_and_follows_the_newest():
    watch = DraftWatch()
    for _ in range(ENOUGH):
        assert not watch.promise and not watch.may_try(knows_costs=False)
        watch.observe(0.03, 0.02)
    assert watch.promise and watch.may_try(knows_costs=False) and watch.ratio == 1.5
    for _ in range(3):
        watch.observe(0.01, 0.02)
    assert not watch.promise and 0.5 < watch.ratio < 1.0


def test_a_lucky_look_among_bad_ones_is_no_promise():
    lucky, mixed = DraftWatch(), DraftWatch()
    for gain in (0.8, 0.8, 2.5):
        lucky.observe(gain, 1.0)
    for gain in (1.6, 2.5, 1.7, 2.5):
        mixed.observe(gain, 1.0)
    assert lucky.ratio > 1.5 and not lucky.promise
    assert mixed.promise is Promise.STRONG


@pytest.mark.parametrize(("plain_s", "knows_costs"), [(0.01, False), (0.0199, True)])
def test_what_would_lose_or_by_known_costs_not_gain_is_tried_after_many_looks_only(plain_s: float, knows_costs: bool):
    watch = DraftWatch()
    for _ in range(ENOUGH_WITHOUT - 1):
        watch.observe(plain_s, 0.02)
    assert (watch.ratio < BEARABLE) is not knows_costs
    assert not watch.promise and not watch.may_try(knows_costs=knows_costs)
    watch.observe(plain_s, 0.02)
    assert watch.may_try(knows_costs=knows_costs)


def test_looks_that_take_longer_are_rarer_and_one_long_one_says_nothing():
    watch = DraftWatch()
    pauses = []
    for proposing_s in (0.0001, 0.0001, 0.05, 0.0001, 0.05, 0.05):
        watch.note_time(proposing_s)
        pauses.append(watch.pause_s(0.001, may_hurry=False))
        watch.observe(0.01, 0.02)
    look_s = PLANNING_S + 0.0001
    assert pauses[0] < pauses[1] == pauses[2] == look_s / WATCHED_SHARE
    assert pauses[ENOUGH] == look_s / HOPELESS_SHARE, "by then it is known that drafts would lose"
    assert pauses[5] == 1024 * 0.001, "bounded"


def test_drafts_that_would_lose_are_never_verified_where_looks_say_so():
    controller = SpeculationController()
    played = play(controller, Drafter(lambda step: 0.0, score=0.9), linear, num_steps=300)
    reasons = controller.stats().reasons
    assert played.num_drafted == 0 and reasons[Reason.CLOSED] > 290


class ColdDrafter(Drafter):
    """A proposer that takes thirty times as long when it was not asked for some steps."""

    last_step = -100

    def propose(self, step: int, num_rows: int, most: int, rng: np.random.Generator) -> Proposals:
        is_cold = step > self.last_step + 8
        self.seconds, self.last_step = 0.03 if is_cold else 0.001, step
        return super().propose(step, num_rows, most, rng)


def test_what_a_proposer_takes_in_looks_keeps_no_good_drafts_from_a_trial():
    controller = SpeculationController()
    played = play(controller, ColdDrafter(lambda step: 0.8), linear, num_steps=4000)
    assert played.ratio > 1.3 and controller.stats().num_closings == 0


def test_a_promise_is_a_reason_to_open_while_a_debt_is_left():
    guard, bucket = DraftGuard(), bucket_of(1, 0, 100)
    while not guard.num_closings:
        is_open = guard.next_arm(bucket, promise=Promise.NONE, may_try=True).name == "OPEN"
        guard.record(bucket, is_open, 0.01, 0.03 if is_open else 0.01, is_probe=False)
    guard.pass_time(2.0)
    assert guard.debt_s > 0
    assert guard.next_arm(bucket, promise=Promise.NONE, may_try=True).name == "CLOSED"
    assert guard.next_arm(bucket, promise=Promise.SOME, may_try=True).name == "OPEN"


def test_what_capturing_took_is_owed_when_drafts_did_not_gain():
    debts = []
    for captured_s in (0.0, 0.2):
        guard, bucket = DraftGuard(), bucket_of(1, 0, 100)
        while not guard.num_closings:
            if guard.next_arm(bucket, promise=Promise.NONE, may_try=True).name == "OPEN":
                if captured_s and not guard.buckets[bucket].captured_s:
                    guard.record_capture(bucket, 0.01, 0.01 + captured_s)
                guard.record(bucket, True, 0.01, 0.03, is_probe=False)
            else:
                guard.record(bucket, False, 0.01, 0.01, is_probe=False)
        debts.append(guard.debt_s)
    assert 0.19 < debts[1] - debts[0] < 0.21


def test_few_numbers_of_drafts_are_considered_and_always_all():
    assert common_budgets(1, 17) == (1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 15, 17)
    assert common_budgets(33, 3) == (1, 2, 3)
    assert common_budgets(33, 32) == (1, 2, 3, 4, 5, 6, 7, 8, 15, 31, 32)


def test_few_drafts_have_the_chances_that_they_have_among_many():
    rng, counts = np.random.default_rng(0), [3, 0, 5, 1]
    few, many = Survival(), Survival()
    for _ in range(30):
        small = make_proposals(counts, score=float(rng.uniform(0.1, 1.0)), match_length=int(rng.integers(0, 40)))
        large = make_proposals([*counts, FEW], score=float(small.scores[0]), match_length=int(small.match_lengths[0]))
        expected = many.chances(large)[: sum(counts)]
        assert np.allclose(few.chances(small), expected)
        kept = np.minimum(rng.integers(0, 6, 4), counts).astype(np.int32)
        accepted = np.minimum(rng.integers(0, 6, 4), kept).astype(np.int32)
        few.record(small, kept, accepted)
        many.record(large, np.append(kept, 0), np.append(accepted, 0))


def test_behind_a_look_that_is_right_where_those_before_were_wrong_the_next_ones_come_soon():
    watch = DraftWatch()
    for _ in range(ENOUGH):
        watch.observe(0.5, 1.0)
    watch.note_time(0.002)  # a look takes more than SHORT_LOOK of these steps
    rare_s = watch.pause_s(0.001, may_hurry=True)
    num_looks = 0
    while not watch.promise:
        watch.observe(2.5, 1.0)
        num_looks += 1
        if not watch.promise:
            assert watch.pause_s(0.001, may_hurry=True) < rare_s / 3
            assert watch.pause_s(0.001, may_hurry=False) > rare_s / 3
    assert 2 <= num_looks <= 4
    watch.disappoint(0.9)
    watch.observe(2.5, 1.0)
    assert watch.pause_s(0.001, may_hurry=True) == watch.pause_s(0.001, may_hurry=False), "a few looks prove nothing"
