"""Costs, chances and budgets: what is learned of them, and what is chosen from them."""

from __future__ import annotations

import numpy as np
import pytest

from quire.core.drafts import Proposals
from quire.spec_decode.cost_table import ENOUGH_TRIALS, KNOTS, CostTable, LearnedCurve
from quire.spec_decode.draft_budget import best_budget, counts_of, rank_drafts, worths_of, worths_of_few
from quire.spec_decode.load import bucket_of
from quire.spec_decode.survival import Survival

SHORT = bucket_of(1, 0, 100)


def make_proposals(counts: list[int], score: float = 0.5, match_length: int = 4, source: int = 0) -> Proposals:
    num_drafts, num_rows = sum(counts), len(counts)
    return Proposals(
        counts=np.array(counts, dtype=np.int32),
        token_ids=np.zeros(num_drafts, dtype=np.int32),
        scores=np.full(num_drafts, score, dtype=np.float32),
        sources=np.full(num_rows, source, dtype=np.int32),
        match_lengths=np.full(num_rows, match_length, dtype=np.int32),
    )


# --- costs ---


def test_measured_steps_are_predicted():
    costs, bucket = CostTable(), bucket_of(4, 0, 100)
    for _ in range(20):
        costs.record(bucket, 4, 0, 0, 0.020)
        costs.record(bucket, 4, 0, 8, 0.030)
    assert costs.plain_seconds(bucket, 4, 0) == pytest.approx(0.020, rel=0.01)
    assert costs.decode_seconds(bucket, 4, (8,))[1] == pytest.approx(0.030, rel=0.05)


def test_no_step_is_predicted_to_be_shorter_for_more_tokens():
    costs, bucket = CostTable(), bucket_of(2, 0, 100)
    rng = np.random.default_rng(0)
    for _ in range(300):
        num_drafts = int(rng.integers(0, 30))
        costs.record(bucket, 2, 0, num_drafts, float(rng.uniform(0.001, 0.1)))
        assert (np.diff(costs.decode_seconds(bucket, 2, range(1, 41))) >= 0).all()


def test_prompt_tokens_have_a_price_of_their_own():
    costs, quiet, mixed = CostTable(), bucket_of(2, 0, 100), bucket_of(2, 100, 100)
    for _ in range(50):
        costs.record(quiet, 2, 0, 0, 0.010)
        costs.record(mixed, 2, 100, 0, 0.110)
    assert costs.plain_seconds(mixed, 2, 200) == pytest.approx(0.210, rel=0.02)
    assert costs.decode_seconds(mixed, 2, ())[0] == pytest.approx(0.010, rel=0.02)


def test_longer_contexts_begin_with_what_shorter_ones_cost():
    costs = CostTable()
    costs.record(bucket_of(1, 0, 100), 1, 0, 0, 0.010)
    longer = bucket_of(1, 0, 3000)
    assert costs.plain_seconds(longer, 1, 0) == pytest.approx(0.010)
    for _ in range(40):
        costs.record(longer, 1, 0, 0, 0.030)
    assert costs.plain_seconds(longer, 1, 0) == pytest.approx(0.030, rel=0.05)
    assert costs.plain_seconds(bucket_of(1, 0, 100), 1, 0) == pytest.approx(0.010)


def test_where_measurements_say_that_more_tokens_take_less_the_newest_one_holds():
    """The machine was slow when a step of one row was measured, and is not any more."""
    curve = LearnedCurve(np.array(KNOTS, dtype=np.float64), 1.0 + 0.05 * np.arange(len(KNOTS)))
    curve.observe(1, 0.03)
    for _ in range(100):
        curve.observe(4, 0.02)
    assert curve.value(1) == curve.value(4) == pytest.approx(0.02)
    curve.observe(1, 0.03)
    assert curve.value(1) == curve.value(4) > 0.021, "now that is the newest one"


def test_the_mean_of_many_steps_counts_for_as_many():
    one, many = (LearnedCurve(np.array(KNOTS, dtype=np.float64), np.ones(len(KNOTS))) for _ in range(2))
    for curve in (one, many):
        for _ in range(50):
            curve.observe(2, 0.01)
    one.observe(2, 0.02)
    many.observe(2, 0.02, 100)
    assert 0.0105 < one.value(2) < 0.011 and many.value(2) > 0.0199


def test_a_step_with_drafts_takes_no_less_than_it_would_without():
    costs = CostTable()
    for _ in range(20):
        costs.record(SHORT, 1, 0, 0, 0.03)  # the machine was slow
    for _ in range(60):
        costs.record(SHORT, 1, 0, 4, 0.02)
    assert costs.plain_seconds(SHORT, 1, 0) == pytest.approx(0.02, rel=0.05)


def test_more_drafts_than_were_measured_may_cost_no_more_each_until_they_were_tried():
    costs = CostTable()
    costs.record(SHORT, 1, 0, 0, 0.01)
    assert costs.hoped_seconds(SHORT, 1, 4, (8, 16)) == [None, None], "what four cost is not known"
    costs.record(SHORT, 1, 0, 4, 0.012)
    assert costs.hoped_seconds(SHORT, 1, 4, (8, 16)) == pytest.approx([0.014, 0.018])
    for _ in range(ENOUGH_TRIALS):
        costs.record(SHORT, 1, 0, 8, 0.02)
    assert costs.hoped_seconds(SHORT, 1, 4, (8, 16)) == [None, pytest.approx(0.018)]


def test_one_disturbed_trial_of_a_number_is_outweighed_by_the_next_ones():
    costs = CostTable()
    for num_drafts, seconds in ((0, 0.01), (4, 0.02), (4, 0.012), (4, 0.03), (4, 0.012), (4, 0.012), (4, 0.012)):
        costs.record(SHORT, 1, 0, num_drafts, seconds)
    assert costs.decode_seconds(SHORT, 1, (4,))[1] < 0.0145


def test_steps_whose_drafts_were_turned_down_are_apart_from_plain_ones():
    costs = CostTable()
    costs.record(SHORT, 1, 0, 0, 0.01)
    for _ in range(20):
        costs.record_turned_down(SHORT, 1, 0, 0.012)
    assert costs.plain_seconds(SHORT, 1, 0) == pytest.approx(0.01)
    assert costs.turned_down_seconds(SHORT, 1) == pytest.approx(0.012)


# --- chances ---


def test_at_first_the_proposers_scores_are_believed():
    chances = Survival().chances(make_proposals([2, 0, 3], score=0.5))
    assert chances.tolist() == pytest.approx([0.5, 0.25, 0.5, 0.25, 0.125])


def test_chances_become_what_is_observed():
    survival, proposals = Survival(), make_proposals([3] * 50, score=0.99)
    for _ in range(100):
        survival.record(proposals, proposals.counts, np.array([3, 1, 0, 0, 0] * 10))
    assert survival.chances(make_proposals([3], score=0.99)).tolist() == pytest.approx([0.4, 0.2, 0.2], abs=0.02)


def test_what_follows_a_wrong_draft_counts_neither_for_nor_against():
    survival, proposals = Survival(), make_proposals([3], score=0.5)
    for _ in range(100):
        survival.record(proposals, np.array([3]), np.array([1]))
    first, second, third = survival.chances(proposals).tolist()
    assert first > 0.95 and second < 0.05
    assert third == pytest.approx(0.5 * second)


def test_drafts_that_were_not_verified_were_not_observed():
    survival, proposals = Survival(), make_proposals([3], score=0.5)
    survival.record(proposals, np.array([0]), np.array([0]))
    survival.record(proposals, np.array([1]), np.array([1]))
    assert survival.chances(proposals)[1] == pytest.approx(survival.chances(proposals)[0] * 0.5)


@pytest.mark.parametrize("other", [{"source": 1}, {"match_length": 40}, {"score": 0.1}])
def test_other_sources_matches_and_scores_are_others(other: dict[str, float]):
    survival, proposals = Survival(), make_proposals([1], score=0.5)
    expected = survival.chances(make_proposals([1], **{"score": 0.5, **other}))
    survival.record(proposals, np.array([1]), np.array([0]))
    assert survival.chances(make_proposals([1], **{"score": 0.5, **other})) == pytest.approx(expected)


# --- budgets ---


def test_the_drafts_that_are_worth_most_are_chosen_of_all_rows():
    chances, counts = np.array([0.9, 0.8, 0.1, 0.3, 0.95]), np.array([3, 1, 1])
    worth = worths_of(chances, counts)
    ranked = rank_drafts(worth)
    best = best_budget(worth[ranked], 3, range(1, 6), [1.0, 1.1, 1.2, 1.3, 1.9, 2.6])
    assert best.num_drafts == 3 and best.gain == pytest.approx((2.7 * 1.0 * 1.95) ** (1 / 3) / 1.3)
    assert counts_of(ranked[:3], counts).tolist() == [2, 0, 1]


def test_of_one_row_expected_tokens_count():
    worth = worths_of_few([0.9, 0.8, 0.1], [3])
    assert best_budget(worth, 1, (1, 2, 3), [1.0, 1.1, 1.2, 1.3]).gain == pytest.approx(2.7 / 1.2)


def test_other_rows_do_not_wait_for_the_drafts_of_one():
    """Eight drafts that are all but certain give half as many tokens again, and 15 rows a quarter fewer in a second."""
    rows, seconds = np.array([8] + 15 * [0]), [0.026, 0.035]
    assert best_budget(worths_of(np.full(8, 0.98), rows), 16, [8], seconds).num_drafts == 0
    assert best_budget(worths_of(np.full(8, 0.98), rows), 16, [8], [0.026, 0.0275]).num_drafts == 8
    assert best_budget(worths_of(np.full(8, 0.98), np.array(8 * [1] + 8 * [0])), 16, [8], seconds).num_drafts == 8


@pytest.mark.parametrize("counts", [[3], [0, 4, 1, 0], [2, 5, 3], [0]])
def test_what_drafts_are_worth_is_the_same_one_by_one_and_at_once(counts: list[int]):
    chances = np.concatenate([np.cumprod(np.linspace(0.9, 0.5, count)) for count in counts])
    assert worths_of(chances, np.array(counts)) == pytest.approx(worths_of_few(chances.tolist(), counts))


def test_a_gain_below_three_percent_is_not_taken():
    assert best_budget(worths_of_few([0.029], [1]), 1, [1], [1.0, 1.0]).num_drafts == 0
    assert best_budget(worths_of_few([0.031], [1]), 1, [1], [1.0, 1.0]).num_drafts == 1
    assert best_budget([], 1, [], [1.0]).num_drafts == 0


def test_another_number_than_that_of_the_step_before_must_be_clearly_better():
    worth, seconds = worths_of_few([0.9, 0.5], [2]), [0.01, 0.0105, 0.0125]  # 1.81 and 1.92 tokens per plain step
    assert best_budget(worth, 1, (1, 2), seconds).num_drafts == 2
    assert best_budget(worth, 1, (1, 2), seconds, newest=1).num_drafts == 1
    assert best_budget(worths_of_few([0.9, 0.9], [2]), 1, (1, 2), seconds, newest=1).num_drafts == 2


def test_chosen_drafts_are_the_first_ones_of_their_rows():
    rng = np.random.default_rng(0)
    counts = np.array([4, 0, 3, 8])
    for _ in range(100):
        chances = np.concatenate([np.cumprod(rng.choice([0.5, 1.0], count)) for count in counts])
        kept = counts_of(rank_drafts(chances)[:6], counts)
        assert kept.sum() == 6
        starts = np.cumsum(counts) - counts
        taken = np.concatenate([chances[start : start + count] for start, count in zip(starts, kept, strict=True)])
        assert sorted(taken) == sorted(chances)[-6:]
