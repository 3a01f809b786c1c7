from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from quire.core.runner_output import ModelRunnerOutput
from quire.core.scheduler_output import NO_BLOCK_COPIES, BlockCopies, SchedulerOutput
from quire.scheduler.swap_costs import MIN_COPIES, MIN_PROMPT_TOKENS, NUM_KEPT, Measurements, SwapCosts, is_swap_cheaper

NO_ROWS = np.empty(0, dtype=np.int32)
OUTPUT = ModelRunnerOutput(rows=NO_ROWS, sampled_token_ids=NO_ROWS)


def copies(num_blocks: int) -> BlockCopies:
    ids = np.arange(num_blocks, dtype=np.int32)
    return BlockCopies(ids, ids) if num_blocks else NO_BLOCK_COPIES


def step(num_tokens: list[int], num_computed: list[int], outs: int = 0, ins: int = 0) -> SchedulerOutput:
    return SchedulerOutput(
        step=0, freed_rows=NO_ROWS, new_reqs=(), new_blocks=(), rows=np.arange(len(num_tokens), dtype=np.int32),
        num_scheduled_tokens=np.array(num_tokens), num_computed_tokens=np.array(num_computed),
        is_prefill=np.array(num_tokens) > 1,
        is_sampling=np.ones(len(num_tokens), dtype=np.bool_), total_num_scheduled_tokens=sum(num_tokens),
        swap_outs=copies(outs), swap_ins=copies(ins),
    )  # fmt: skip


def with_swaps(out_s: float | None, in_s: float | None) -> ModelRunnerOutput:
    return dataclasses.replace(OUTPUT, swap_out_s=out_s, swap_in_s=in_s)


@pytest.mark.parametrize(
    ("swap_s", "recompute_s", "expected"),
    [(1.0, 2.0, True), (2.0, 1.0, False), (None, 1e-9, True), (1e9, None, True), (None, None, True), (0.0, 0.0, False)],
)
def test_the_cheaper_one_is_chosen_and_what_is_not_known_is_swapped(swap_s, recompute_s, expected):
    assert is_swap_cheaper(swap_s, recompute_s) is expected


def test_copies_cost_what_copies_of_like_size_did_once_there_are_enough():
    costs = SwapCosts()
    for i in range(MIN_COPIES):
        assert costs.estimate_swap_s(100, 50) is None
        costs.record(step([1], [9], outs=100, ins=50), with_swaps(0.1, 0.2 + i), None)
    assert costs.estimate_swap_s(100, 50) == pytest.approx(0.1 + 1.2)
    assert costs.estimate_swap_s(120, 0) == pytest.approx(0.12)
    assert costs.estimate_swap_s(300, 50) is None and costs.estimate_swap_s(100, 20) is None


def test_a_step_s_decoding_and_its_copies_are_not_counted_as_its_prompts():
    costs = SwapCosts()
    costs.record(step([1, 1], [50, 60]), OUTPUT, 0.5)
    costs.record(step([1, 1, 100], [50, 60, 0], outs=4, ins=4), with_swaps(1.0, 2.0), 0.5 + 3.0 + 10.0)
    assert costs.estimate_recompute_s(0, 10) == pytest.approx(1.0)
    assert costs.estimate_recompute_s(10, 10) == 0.0


def test_recomputed_tokens_cost_what_tokens_of_such_places_did():
    costs = SwapCosts()
    for start, per_token_s in ((0, 0.01), (1000, 0.02), (10_000, 0.11)):
        for noise in (0.9, 1.0, 5.0) * 2:
            costs.record(step([200], [start]), OUTPUT, 200 * per_token_s * noise)
    assert costs.estimate_recompute_s(0, 200) == pytest.approx(2.0)
    assert costs.estimate_recompute_s(0, 2000) == pytest.approx(40.0)
    assert costs.estimate_recompute_s(9_000, 11_000) == pytest.approx(220.0)


def test_without_a_measured_prompt_nothing_is_known_and_unmeasured_steps_and_short_prompts_say_nothing():
    costs = SwapCosts()
    costs.record(step([1], [5]), OUTPUT, 0.1)
    costs.record(step([70], [5]), OUTPUT, None)
    costs.record(step([1, MIN_PROMPT_TOKENS - 1], [5, 5]), OUTPUT, 0.2)
    assert costs.estimate_recompute_s(0, 10) is None


def test_old_measurements_are_forgotten():
    kept = Measurements()
    kept.record(10, 99.0)
    for _ in range(NUM_KEPT):
        kept.record(10, 1.0)
    assert kept.estimate(10) == 1.0


def test_many_measurements_of_one_size_do_not_push_out_another():
    kept = Measurements()
    kept.record(1000, 99.0)
    for _ in range(10 * NUM_KEPT):
        kept.record(10, 1.0)
    assert kept.estimate(1000, within=2.0) == 99.0 and kept.estimate(12) == 1.0
