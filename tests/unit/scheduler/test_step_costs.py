"""Prompts beside decoding requests: how many tokens of them a step holds, by a clock that the test makes up."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.core.scheduler_output import SchedulerOutput
from quire.scheduler.budget import StepBudget, share_prompt_tokens
from quire.scheduler.step_costs import MAX_STEPS_BESIDE, MIN_PROMPT_TOKENS, StepCosts, max_prompt_tokens
from tests.unit.scheduler.harness import Engine, make_request, make_scheduler

QUIET_S = 0.1


@dataclass
class Machine:
    """Durations of steps: decoding costs by request, prompts by token, everything times `load`."""

    per_request_s: float = 0.002
    per_prompt_token_s: float = 0.001
    load: float = 1.0

    def decode_only_s(self, num_decoding: int) -> float:
        return self.load * (QUIET_S + self.per_request_s * num_decoding)

    def seconds(self, num_decoding: int, num_prompt_tokens: int) -> float:
        return self.decode_only_s(num_decoding) + self.load * self.per_prompt_token_s * num_prompt_tokens

    def duration(self, scheduled: SchedulerOutput) -> float:
        num_decoding, num_prompt_tokens = parts_of(scheduled)
        return self.seconds(num_decoding, num_prompt_tokens)


def parts_of(scheduled: SchedulerOutput) -> tuple[int, int]:
    num_decoding = int((scheduled.num_scheduled_tokens == 1).sum())
    return num_decoding, scheduled.total_num_scheduled_tokens - num_decoding


def run_steps(costs: StepCosts, machine: Machine, num_decoding: int, num_steps: int) -> list[int]:
    """Prompt tokens of each step while prompts never run out."""
    granted = []
    for _ in range(num_steps):
        num_prompt_tokens = costs.prompt_tokens_beside(num_decoding)
        costs.record(num_decoding, num_prompt_tokens, machine.seconds(num_decoding, num_prompt_tokens))
        granted.append(num_prompt_tokens)
    return granted


def decoding_beside_a_long_prompt(max_decode_slowdown: float | None, machine: Machine) -> Engine:
    """Four requests decode, then one with a prompt of 2000 tokens comes and is answered."""
    scheduler = make_scheduler(
        num_blocks=400, block_size=16, max_model_len=3000, budget=4096, max_decode_slowdown=max_decode_slowdown
    )
    engine = Engine(scheduler, duration=machine.duration)
    engine.add(*(make_request(handle, 8, max_tokens=400) for handle in range(4)))
    for _ in range(10):
        engine.step()
    engine.scheduled.clear()
    engine.add(make_request(9, 2000, max_tokens=1))
    while 9 not in engine.finished:
        engine.step()
    return engine


def test_a_long_prompt_keeps_every_decode_step_under_twice_the_quiet_one():
    machine = Machine()
    engine = decoding_beside_a_long_prompt(2.0, machine)
    steps = [parts_of(scheduled) for scheduled in engine.scheduled]
    assert all(num_decoding >= 4 for num_decoding, _ in steps), "nobody who decodes waits"
    assert all(machine.seconds(*step) < 2 * machine.decode_only_s(step[0]) for step in steps)
    assert len(steps) < 40, "the room that the bound leaves is used"


def test_without_a_bound_the_prompt_is_computed_in_one_step():
    engine = decoding_beside_a_long_prompt(None, Machine())
    assert [parts_of(scheduled) for scheduled in engine.scheduled] == [(4, 2000)]


def test_the_bound_does_not_change_what_requests_get():
    bounded, free = (decoding_beside_a_long_prompt(bound, Machine()) for bound in (2.0, None))
    bounded.run()
    free.run()
    assert bounded.tokens == free.tokens and bounded.finished == free.finished


def test_prompts_that_nobody_decodes_beside_have_the_whole_budget():
    engine = Engine(
        make_scheduler(num_blocks=400, block_size=16, max_model_len=3000, budget=1024, max_decode_slowdown=2.0)
    )
    engine.add(make_request(0, 2000, max_tokens=1))
    engine.run()
    assert [parts_of(scheduled) for scheduled in engine.scheduled] == [(0, 1024), (0, 976)]


def test_the_first_step_in_which_requests_decode_is_bounded_too():
    engine = Engine(
        make_scheduler(num_blocks=400, block_size=16, max_model_len=3000, budget=256, max_decode_slowdown=2.0)
    )
    engine.add(make_request(0, 200, max_tokens=50), make_request(1, 2000, max_tokens=1))
    for _ in range(4):
        engine.step()
    steps = [parts_of(scheduled) for scheduled in engine.scheduled]
    assert steps[0] == (0, 256), "both prompts, nobody decodes"
    assert all(beside <= 2 * MIN_PROMPT_TOKENS for _, beside in steps[1:])


def test_several_prompts_share_the_bound_in_order_of_arrival():
    prompts = StepBudget(20)
    num_wanted = np.array([1, 12, 1, 30, 5], dtype=np.int32)
    granted = share_prompt_tokens(num_wanted, num_wanted > 1, prompts)
    assert granted.tolist() == [1, 12, 1, 8, 0] and prompts.num_left == 0


def test_the_first_prompt_tokens_are_few_and_grow_at_most_twofold():
    costs, machine = StepCosts(100.0), Machine(per_prompt_token_s=1e-5)
    costs.record(4, 0, machine.seconds(4, 0))
    granted = run_steps(costs, machine, 4, 12)
    assert granted[0] == MIN_PROMPT_TOKENS
    assert all(later <= 2 * earlier for earlier, later in zip(granted, granted[1:], strict=False))
    assert granted[-1] > 100 * MIN_PROMPT_TOKENS


def test_one_slow_step_changes_nothing_and_a_slower_machine_keeps_the_proportion():
    costs, machine = StepCosts(2.0), Machine()
    settled = run_steps(costs, machine, 8, 20)[-1]
    costs.record(8, settled, 50.0)
    costs.record(8, 0, 50.0)
    assert costs.prompt_tokens_beside(8) == settled
    machine.load = 3.0
    granted = run_steps(costs, machine, 8, 3 * MAX_STEPS_BESIDE)
    assert granted[-1] == pytest.approx(settled, rel=0.05)


def test_prompts_that_never_end_leave_a_quiet_step_now_and_then():
    granted = run_steps(StepCosts(2.0), Machine(), 8, 4 * MAX_STEPS_BESIDE)
    assert 4 <= granted.count(0) <= 5
    assert not any(a == b == 0 for a, b in zip(granted, granted[1:], strict=False))


def test_fewer_decoding_requests_than_were_ever_measured_are_not_taken_for_slow():
    costs, machine = StepCosts(2.0), Machine(per_request_s=QUIET_S)
    run_steps(costs, machine, 16, 20)
    assert machine.seconds(2, costs.prompt_tokens_beside(2)) < 2 * machine.decode_only_s(2)


def test_a_burst_beside_one_decoding_request_comes_in_at_the_pace_of_a_full_batch():
    costs, machine = StepCosts(2.0), Machine(per_request_s=0.01)
    run_steps(costs, machine, 1, 20)
    alone = costs.prompt_tokens_beside(1)
    for measured in (False, True):
        if measured:
            costs.record(64, 0, machine.decode_only_s(64))
        granted = [alone]
        for _ in range(10):
            granted.append(costs.prompt_tokens_beside(1, 64))
            costs.record(1, granted[-1], machine.seconds(1, granted[-1]))
        assert granted[-1] > 1.5 * alone
        assert machine.decode_only_s(1) < machine.seconds(1, granted[-1]) < 2 * machine.decode_only_s(64)
        assert costs.prompt_tokens_beside(1, 1) == pytest.approx(alone, rel=0.05)


def test_steps_beside_prompts_keep_within_the_latency_asked_for():
    machine = Machine()
    costs = StepCosts(float("inf"), 0.2)
    costs.record(8, 0, machine.decode_only_s(8))
    granted = run_steps(costs, machine, 8, 3 * MAX_STEPS_BESIDE)
    assert max(machine.seconds(8, one) for one in granted) < 0.2
    assert granted[-1] > 6 * MIN_PROMPT_TOKENS, "and what it leaves is used"


def test_of_two_bounds_the_tighter_one_holds():
    machine = Machine()
    settled = {}
    for slowdown, latency in ((2.0, 0.15), (1.1, 10.0), (2.0, 10.0)):
        costs = StepCosts(slowdown, latency)
        costs.record(8, 0, machine.decode_only_s(8))
        settled[slowdown, latency] = run_steps(costs, machine, 8, 30)[-1]
    assert settled[1.1, 10.0] < settled[2.0, 0.15] < settled[2.0, 10.0]


def test_a_latency_that_decoding_alone_exceeds_leaves_prompts_their_least():
    machine = Machine()
    costs = StepCosts(float("inf"), QUIET_S / 10)
    costs.record(8, 0, machine.decode_only_s(8))
    assert {*run_steps(costs, machine, 8, 3 * MAX_STEPS_BESIDE)} == {0, MIN_PROMPT_TOKENS}


def test_a_latency_alone_bounds_a_schedulers_steps():
    machine = Machine()
    scheduler = make_scheduler(
        num_blocks=400, block_size=16, max_model_len=3000, budget=4096, max_inter_token_latency_ms=200.0
    )
    engine = Engine(scheduler, duration=machine.duration)
    engine.add(*(make_request(handle, 8, max_tokens=400) for handle in range(4)))
    for _ in range(5):
        engine.step()
    engine.add(make_request(9, 2000, max_tokens=2))
    while 9 not in engine.finished:
        scheduled = engine.step()
        assert scheduled is not None and machine.duration(scheduled) < 0.2


def test_the_price_that_is_zero_or_less_bounds_nothing_by_itself():
    assert max_prompt_tokens(0.1, 0.2, 0.0) == max_prompt_tokens(0.1, 0.2, -1.0) == float("inf")
    assert max_prompt_tokens(0.1, 0.1, 0.001) == 0


@settings(max_examples=60, deadline=None)
@given(
    st.floats(1.0, 10.0),
    st.lists(st.tuples(st.integers(1, 300), st.one_of(st.none(), st.floats(0.0, 100.0))), max_size=200),
)
def test_whatever_is_measured_prompts_get_on_in_every_second_step(max_slowdown, measured):
    costs = StepCosts(max_slowdown)
    granted = []
    for num_decoding, seconds in measured:
        num_prompt_tokens = costs.prompt_tokens_beside(num_decoding)
        granted.append(num_prompt_tokens)
        costs.record(num_decoding, num_prompt_tokens, seconds)
    assert all(one == 0 or one >= MIN_PROMPT_TOKENS for one in granted)
    assert all(max(pair) >= MIN_PROMPT_TOKENS for pair in zip(granted, granted[1:], strict=False))


@settings(max_examples=40, deadline=None)
@given(st.floats(1e-4, 1.0), st.floats(1e-6, 1e-2), st.floats(1.5, 4.0), st.integers(1, 300))
def test_on_a_machine_that_keeps_to_the_law_no_step_is_slower_than_asked(base_s, token_s, max_slowdown, num_decoding):
    machine = Machine(per_request_s=base_s / 100, per_prompt_token_s=token_s)
    costs = StepCosts(max_slowdown)
    for num_prompt_tokens in run_steps(costs, machine, num_decoding, 100):
        slowdown = machine.seconds(num_decoding, num_prompt_tokens) / machine.decode_only_s(num_decoding)
        assert slowdown <= max_slowdown or num_prompt_tokens == MIN_PROMPT_TOKENS
