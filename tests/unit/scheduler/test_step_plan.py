from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.core.request import Request
from quire.core.scheduler_output import NewRequestData
from quire.scheduler.budget import StepBudget, WantedTokens, apply_caps, cap_long_prefill
from quire.scheduler.request_table import RequestTable
from quire.scheduler.step_plan import StepPlan
from tests.unit.scheduler.harness import make_request, same_message


def make_table(num_rows: int, num_tokens: int = 10) -> RequestTable:
    table = RequestTable(num_rows, 40)
    for handle in range(num_rows):
        table.allocate(Request.from_message(make_request(handle, num_tokens), handle), 0)
    return table


def new_data(row: int) -> NewRequestData:
    message = make_request(row, 10)
    return NewRequestData(
        row=row, request_id=message.request_id, token_ids=message.prompt_token_ids, num_prompt_tokens=10,
        sampling_params=message.sampling_params, seed=0, eos_token_id=-1, block_ids=(np.array([row + 1]),),
    )  # fmt: skip


def test_the_budget_goes_to_requests_in_order_until_it_is_spent():
    budget = StepBudget(10)
    assert budget.take_in_order(np.array([4, 0, 5, 3, 1])).tolist() == [4, 0, 5, 1, 0]
    assert budget.num_left == 0
    budget.refund(2)
    assert budget.take_in_order(np.array([1])).tolist() == [1]
    assert budget.num_left == 1


def test_nobody_on_an_empty_list_spends_nothing():
    budget = StepBudget(10)
    assert budget.take_in_order(np.empty(0, np.int32)).tolist() == []
    assert budget.num_left == 10


def test_spending_more_than_is_left_is_a_broken_invariant():
    with pytest.raises(AssertionError, match="over budget"):
        StepBudget(3).take(4)


def wanted_tokens(num_tokens: list[int], num_unfinished: int) -> WantedTokens:
    """Of requests 0, 1, ..., of which as many tokens are computed."""
    requests = [Request.from_message(make_request(handle)) for handle in range(len(num_tokens))]
    return WantedTokens(
        num_tokens=np.array(num_tokens), starts=np.arange(len(num_tokens)), request_of=requests.__getitem__,
        num_unfinished=num_unfinished,
    )  # fmt: skip


def test_long_prompts_are_capped_only_while_others_want_to_run():
    caps = (cap_long_prefill(8),)
    assert apply_caps(caps, wanted_tokens([20, 1], num_unfinished=2)).tolist() == [8, 1]
    assert apply_caps(caps, wanted_tokens([20], num_unfinished=1)).tolist() == [20]


def test_caps_bound_one_another_and_see_which_requests_they_bound_and_where_these_stand():
    seen = []

    def cap(wanted: WantedTokens) -> np.ndarray:
        seen.append([(wanted.request_of(i).handle, int(wanted.starts[i])) for i in range(len(wanted.num_tokens))])
        return np.minimum(wanted.num_tokens, 5 - wanted.starts)

    wanted = wanted_tokens([20, 9], num_unfinished=2)
    assert apply_caps((cap_long_prefill(8), cap), wanted).tolist() == [5, 4]
    assert apply_caps((), wanted).tolist() == wanted.num_tokens.tolist() == [20, 9]
    assert seen == [[(0, 0), (1, 1)]]


def test_a_frozen_plan_lists_running_rows_then_new_ones_and_leaves_out_rows_without_tokens():
    table = make_table(4)
    table.num_computed_tokens[1] = 7
    plan = StepPlan(StepBudget(14), 4)
    plan.add_running(np.array([2, 1, 0], np.int32), np.array([10, 3, 10]))
    plan.undo(2)
    plan.add_new(new_data(3), 4)
    message = plan.freeze(5, [2], table)
    assert message.step == 5
    assert message.rows.tolist() == [1, 0, 3]
    assert message.num_scheduled_tokens.tolist() == [3, 1, 4]
    assert message.num_computed_tokens.tolist() == [7, 0, 0]
    assert message.is_sampling.tolist() == [True, False, False]
    assert message.total_num_scheduled_tokens == 8
    assert message.freed_rows.tolist() == [2]
    assert [new.row for new in message.new_reqs] == [3]


def test_a_plan_is_empty_until_a_row_has_tokens_and_again_when_all_are_undone():
    plan = StepPlan(StepBudget(4), 2)
    assert plan.is_empty
    plan.add_running(np.array([0, 1], np.int32), np.array([2, 2]))
    assert not plan.is_empty
    plan.undo(0)
    plan.undo(1)
    assert plan.is_empty and plan.budget.num_left == 4


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 10), min_size=1, max_size=6),
    st.lists(st.integers(1, 10), max_size=3),
    st.integers(1, 60),
)
def test_dropping_the_last_planned_rows_equals_never_having_planned_them(wanted, wanted_by_new, num_tokens):
    table = make_table(len(wanted) + len(wanted_by_new))
    for num_kept in range(len(wanted) + 1):
        kept, dropped = StepPlan(StepBudget(num_tokens), 9), StepPlan(StepBudget(num_tokens), 9)
        kept.add_running(np.arange(num_kept, dtype=np.int32), np.array(wanted[:num_kept], dtype=np.int32))
        dropped.add_running(np.arange(len(wanted), dtype=np.int32), np.array(wanted))
        for row in range(len(wanted) - 1, num_kept - 1, -1):
            dropped.undo(row)
        for row, count in enumerate(wanted_by_new, start=len(wanted)):
            if count <= dropped.budget.num_left:
                dropped.add_new(new_data(row), count)
                dropped.undo(row)
        assert kept.budget.num_left == dropped.budget.num_left
        assert kept.is_empty == dropped.is_empty
        assert same_message(kept.freeze(0, [], table), dropped.freeze(0, [], table))
