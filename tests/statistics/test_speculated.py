"""Drafts judged by ratios of probabilities leave the distribution as it is; `make test-rejection` tries far more."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from quire.kernels.native.runtime import NativeRuntime
from quire.sample import drawn_drafts
from quire.sample.ops.native import NativeSamplingOps
from quire.sample.ops.torch_ops import TorchSamplingOps
from quire.sample.rejection_sampler import TypicalAcceptance
from quire.sample.rng import STREAM_ACCEPT
from quire.worker import block_verification
from tests.effort import effort
from tests.statistics.speculated import PARAMS, Way, all_of_them, try_out, up_to_an_odd_one, ways

COUNT = effort(4_000, 20_000)
OPS = NativeSamplingOps(NativeRuntime(num_threads=1))
WAYS = {name: way for name, way in ways() if "penalties" in name and "by context" not in name}
DRAWN = {"standard": Way(False, num_drafts=all_of_them), "block": Way(True, num_drafts=all_of_them)}


@pytest.mark.parametrize("name", WAYS)
def test_continuations_have_the_exact_distribution(name: str) -> None:
    way = WAYS[name]
    p, tokens_per_step = try_out(way, OPS, COUNT)
    assert p > 0.01 / len(WAYS)
    # Of the drafter's likeliest tokens as many stand as by sampling; of drawn ones more.
    _, by_sampling = try_out(dataclasses.replace(way, rule=None, is_block=False, is_drawn=False), OPS, COUNT)
    if way.is_drawn:
        assert tokens_per_step > max(1.2, by_sampling)
    else:
        assert tokens_per_step == pytest.approx(by_sampling, rel=0.02) and tokens_per_step > 1.05


def test_torch_operations_give_the_exact_distribution_too() -> None:
    p, _ = try_out(
        Way(True, params=PARAMS["top-p and penalties"], num_drafts=up_to_an_odd_one), TorchSamplingOps(), COUNT
    )
    assert p > 0.01


@pytest.mark.parametrize("method", DRAWN)
def test_drafts_drawn_with_the_numbers_that_judge_them_would_not(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drawn_drafts, "STREAM_DRAFT", STREAM_ACCEPT)
    p, _ = try_out(DRAWN[method], OPS, COUNT)
    assert p < 1e-9


def test_block_verification_would_not_if_a_position_had_the_same_numbers_in_every_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in (drawn_drafts, block_verification):
        monkeypatch.setattr(module, "attempt", lambda stream, num_before: stream + 0 * num_before)
    p, _ = try_out(DRAWN["block"], OPS, max(10 * COUNT, 40_000))
    assert p < 1e-4


@pytest.mark.parametrize("is_block", [False, True], ids=["standard", "block"])
def test_a_draft_left_out_for_what_it_is_may_not_be_ignored(is_block: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def ignoring(self, token_ids, rows, num_before, is_drawn):
        return of_lines(self, token_ids, rows, num_before, is_drawn & (token_ids >= 0))

    of_lines = drawn_drafts.DrawnDrafts.of_lines
    monkeypatch.setattr(drawn_drafts.DrawnDrafts, "of_lines", ignoring)
    p, _ = try_out(Way(is_block, num_drafts=up_to_an_odd_one), OPS, COUNT)
    assert p < 1e-9


def test_blocks_take_at_least_as_many_tokens_a_step() -> None:
    standard, block = (try_out(DRAWN[method], OPS, COUNT)[1] for method in ("standard", "block"))
    assert block > standard


def test_typical_acceptance_takes_more_and_changes_the_distribution() -> None:
    p, tokens_per_step = try_out(Way(rule=TypicalAcceptance(0.09, 0.3), num_drafts=all_of_them), OPS, COUNT)
    assert p < 1e-9
    assert tokens_per_step > try_out(DRAWN["block"], OPS, COUNT)[1]
    assert np.isfinite(tokens_per_step)
