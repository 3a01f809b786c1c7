"""Drafts in a simulation: the same answers in fewer steps, by as much as the acceptance says."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from quire.simulator.drafts import Speculation, num_right, places_in_rows
from quire.simulator.fleet import simulate
from tests.unit.simulator.test_simulator import EvenCosts, fleet, request


@pytest.mark.parametrize("is_sharing", [False, True], ids=["no cache", "cache"])
def test_certain_drafts_divide_the_steps(is_sharing: bool) -> None:
    setup = fleet(prefix_caching=is_sharing)
    drafting = dataclasses.replace(setup, speculation=Speculation(3, 1.0))
    # A step for the prompt, and 20 tokens more in five steps of four.
    results = simulate(drafting, [request(0.0, output_len=21)])
    assert results.ended_s == pytest.approx([0.6])
    assert results.num_tokens.tolist() == [21] and results.tpot_s == pytest.approx([0.025])
    assert results.gaps.mean() == pytest.approx(0.1), "tokens of a step come together"
    assert simulate(setup, [request(0.0, output_len=21)]).ended_s == pytest.approx([2.1])


def test_hopeless_drafts_save_no_step_and_cost_their_tokens() -> None:
    setup = dataclasses.replace(fleet(costs=EvenCosts(0.1, 0.01)), speculation=Speculation(2, 0.0))
    results = simulate(setup, [request(0.0, output_len=5)])
    # Ten tokens of prompt; then three in a step, but for the last, after which nothing may come, and one before it.
    assert results.ended_s == pytest.approx([0.2 + 0.13 + 0.13 + 0.12 + 0.11]) and results.num_tokens.tolist() == [5]


def test_half_right_drafts_give_the_mean_of_their_law() -> None:
    setup = dataclasses.replace(fleet(), speculation=Speculation(4, 0.5))
    seconds = simulate(setup, [request(0.0, output_len=1501)]).ended_s[0] - 0.1
    per_step = 1500 / (seconds / 0.1)
    assert per_step == pytest.approx(1 + 0.5 + 0.25 + 0.125 + 0.0625, rel=0.06)


def test_the_first_wrong_draft_ends_its_row() -> None:
    counts = np.array([3, 0, 2, 1])
    is_right = np.array([True, False, True, False, True, True])
    assert num_right(is_right, counts).tolist() == [1, 0, 0, 1]
    assert places_in_rows(counts).tolist() == [0, 1, 2, 0, 1, 0]
