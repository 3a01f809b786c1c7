"""Draft tokens: rows that get none, one or several tokens in a step, and the blocks reserved ahead for them."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.config.cache import CacheConfig
from quire.core.drafts import (
    DRAFTS_PER_REQUEST,
    DraftRows,
    Proposals,
    SpeculatedStep,
    StepLoad,
    make_proposals,
    most_drafts,
)
from quire.core.engine_messages import EngineCoreOutputs, EngineCoreRequest, FinishReason
from quire.core.kv_spec import PoolSize
from quire.core.runner_output import ModelRunnerOutput
from quire.kv_cache.planning import plan_kv_cache
from quire.kv_cache.pool_sizes import useful_bytes
from quire.scheduler.step import Step
from quire.spec_decode.controller import SpeculationController
from tests.unit.scheduler.cache_groups import make_spec
from tests.unit.scheduler.harness import FULL, Engine, expected_answer, make_beams, make_request, make_scheduler
from tests.unit.scheduler.pretended_model import Guesses
from tests.unit.scheduler.test_properties import (
    EXAMPLES,
    BeamSpec,
    check_answers,
    play,
    scheduler_settings,
    scripts,
)

NO_TOKENS = np.empty(0, dtype=np.int32)


def make_engine(num_drafts: int = 3, num_right: int = 3, **options: Any) -> Engine:
    return Engine(make_scheduler(proposer=Guesses(num_drafts, num_right), **options))


@pytest.mark.parametrize(("num_right", "num_steps"), [(0, 12), (1, 7), (2, 5), (3, 4)])
def test_a_step_gives_as_many_tokens_as_drafts_were_right_and_one_more(num_right, num_steps):
    engine = make_engine(num_right=num_right)
    request = make_request(0, max_tokens=12)
    engine.add(request)
    engine.run()
    assert engine.tokens[0] == expected_answer(request, 100)[0]
    assert len(engine.scheduled) == num_steps


def test_a_message_says_which_of_a_rows_tokens_are_drafts():
    engine = make_engine()
    engine.add(make_request(0, 5, max_tokens=9))
    assert engine.step().drafts is None
    engine.add(make_request(1, 6, max_tokens=9))
    step = engine.step()
    assert step.drafts.counts.tolist() == [3, 0] and len(step.drafts.token_ids) == 3
    assert step.num_scheduled_tokens.tolist() == [4, 6]
    assert step.is_prefill.tolist() == [False, True] and step.is_sampling.all()


@pytest.mark.parametrize("num_right", [0, 2, 3])
def test_the_front_end_is_told_what_became_of_each_rows_drafts(num_right, monkeypatch):
    engine = make_engine(num_right=num_right)
    told = []
    take_in = engine.scheduler.update_from_output
    monkeypatch.setattr(engine.scheduler, "update_from_output", lambda *given: told.append(take_in(*given)) or told[-1])
    engine.add(make_request(0, 5, max_tokens=30))
    engine.step()
    engine.add(make_request(7, 6, max_tokens=30))
    engine.step()
    engine.step()
    assert told[0].drafts is None
    assert list(told[1].drafts.items()) == [(0, 3, num_right)], "a prompt has no drafts"
    assert list(told[2].drafts.items()) == [(0, 3, num_right), (7, 3, num_right)]


def test_a_stop_among_accepted_tokens_leaves_out_those_behind_it():
    engine = make_engine(num_drafts=6, num_right=6, block_size=2)
    answer, _ = expected_answer(make_request(0, max_tokens=10), 100)
    stop_id = next(token for i, token in enumerate(answer) if i >= 3 and token not in answer[:i])
    request = make_request(0, max_tokens=30, stop_token_ids=[stop_id])
    engine.add(request)
    engine.run()
    assert (engine.tokens[0], engine.finished[0]) == expected_answer(request, 100)
    assert engine.finished[0].finish_reason is FinishReason.STOP


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 4, 5, 6])
def test_no_more_tokens_come_than_were_asked_for(max_tokens):
    engine = make_engine()
    request = make_request(0, max_tokens=max_tokens)
    engine.add(request)
    engine.run()
    assert (engine.tokens[0], engine.finished[0]) == expected_answer(request, 100)


def test_pages_reserved_for_drafts_go_back_when_these_are_not_accepted():
    engine = make_engine(num_drafts=9, num_right=0, block_size=2)
    engine.add(make_request(0, 4, max_tokens=20))
    engine.step()
    held = []
    for _ in range(3):
        step = engine.step()
        held.append(len(engine.scheduler._kv.get_block_ids(int(step.rows[0]))[0]))
    assert held == [3, 3, 4]  # 5, 6, 7 tokens computed


def test_drafts_take_no_page_that_another_request_needs():
    """A pool that is just large enough without them: nothing is preempted, and the answers are the same."""
    engine = make_engine(num_drafts=8, num_right=0, num_blocks=13, block_size=4, prefix_caching=False)
    requests = [make_request(handle, 8, max_tokens=16) for handle in range(2)]
    engine.add(*requests)
    engine.run()
    assert engine.num_preemptions == 0
    assert all(engine.tokens[one.handle] == expected_answer(one, 100)[0] for one in requests)


def test_drafts_take_only_what_is_left_of_the_budget():
    engine = make_engine(budget=8)
    engine.add(make_request(0, 4, max_tokens=20))
    engine.step()
    engine.add(make_request(1, 20, max_tokens=2))
    step = engine.step()
    assert step.num_scheduled_tokens.tolist() == [1, 7] and step.drafts is None


def test_pages_are_published_up_to_accepted_tokens_alone():
    """A second request with the same answer finds blocks of what was sampled, never of a draft that was wrong."""
    engine = make_engine(num_drafts=5, num_right=2, block_size=2)
    first = make_request(0, 4, max_tokens=8)
    engine.add(first)
    engine.run()
    answer = engine.tokens[0]
    second = make_request(1, [*first.prompt_token_ids.tolist(), *answer], max_tokens=6)
    engine.add(second)
    engine.run()
    assert engine.tokens[1] == expected_answer(second, 100)[0]
    assert engine.stats[-2].prefix_cache_hits or any(stats.prefix_cache_hits == 10 for stats in engine.stats)


def test_a_row_may_get_no_token_and_computes_its_newest_one_again():
    scheduler = make_scheduler()
    for handle in (0, 1):
        scheduler.add_request(make_request(handle, 5, max_tokens=3))
    for ids, starts in (([7], [0, 1, 1]), ([9, 8], None)):
        step = scheduler.schedule()
        start_loc = None if starts is None else np.array(starts, dtype=np.int32)
        outputs = scheduler.update_from_output(
            step,
            ModelRunnerOutput(
                rows=step.output.rows, sampled_token_ids=np.array(ids, np.int32), sampled_start_loc=start_loc
            ),
        )
    assert outputs.handles.tolist() == [0, 1] and outputs.new_token_ids.tolist() == [9, 8]
    step = scheduler.schedule()
    assert step.output.num_computed_tokens.tolist() == [6, 5]
    assert step.output.num_scheduled_tokens.tolist() == [1, 1]


class Two:
    """A controller that asks for five drafts a row and verifies two of them; its clock stands unless it is moved."""

    def __init__(self, most: int = 5, skips: int = 0) -> None:
        self.most, self.skips = most, skips
        self.now_s = 0.0
        self.steps: list[SpeculatedStep] = []
        self.skipped: list[tuple[int, float]] = []

    def clock(self) -> float:
        return self.now_s

    def pass_quarter(self, scheduled: object) -> float:
        """A step takes 0.25 s."""
        self.now_s += 0.25
        return 0.25

    def most_tokens(self, num_rows: int, num_other_tokens: int, max_seq_len: int) -> int:
        return self.most

    def num_watched(self) -> int:
        return 0

    def observe(self, load: StepLoad, proposals: Proposals, accepted: np.ndarray) -> None:
        raise AssertionError("nothing is watched")

    def num_skipped(self) -> int:
        return self.skips

    def record_skipped(self, num_steps: int, seconds: float) -> None:
        self.skipped.append((num_steps, seconds))

    def choose(self, load: StepLoad, proposals: Proposals) -> np.ndarray:
        return np.minimum(proposals.counts, 2)

    def record(self, step: SpeculatedStep) -> None:
        self.steps.append(step)


class All(Two):
    """Verifies what there is room for."""

    def most_tokens(self, num_rows: int, num_other_tokens: int, max_seq_len: int) -> int:
        return 1000

    def choose(self, load: StepLoad, proposals: Proposals) -> np.ndarray:
        before = np.cumsum(proposals.counts) - proposals.counts
        return np.clip(load.num_left - before, 0, proposals.counts).astype(np.int32)


def run_apart(controller: Two, *between_s: float) -> None:
    """A prompt, and so many steps of 0.25 s behind it, each after a time in which nothing runs."""
    engine = Engine(make_scheduler(proposer=Guesses(num_drafts=4, num_right=1), controller=controller))
    engine.duration = controller.pass_quarter
    engine.add(make_request(0, 5, max_tokens=40))
    engine.step()
    for seconds in between_s:
        controller.now_s += seconds
        engine.step()


def test_a_controller_says_how_many_drafts_are_verified_and_is_given_what_became_of_them():
    controller = Two()
    engine = Engine(make_scheduler(proposer=Guesses(num_drafts=4, num_right=1), controller=controller))
    request = make_request(0, 5, max_tokens=8)
    engine.add(request)
    engine.run()
    assert engine.tokens[0] == expected_answer(request, 100)[0]
    assert all(step.drafts.counts.tolist() == [2] for step in engine.scheduled[1:-1])
    assert controller.steps == []  # durations were not measured
    engine.duration = controller.pass_quarter
    engine.add(make_request(1, 6, max_tokens=8))
    engine.step()
    engine.step()
    (taken,) = controller.steps  # the step of the prompt has no decoding row
    assert taken.seconds == 0.25 and taken.proposals.counts.tolist() == [4]
    assert (taken.kept.tolist(), taken.accepted.tolist()) == ([2], [1])
    assert (taken.load.num_decoding, taken.load.num_other_tokens, taken.load.max_seq_len) == (1, 0, 7)


def test_a_controller_that_has_closed_a_load_is_asked_again_after_some_steps_or_when_the_load_changes():
    controller = Two(most=0, skips=3)
    engine = Engine(make_scheduler(proposer=Guesses(num_drafts=4, num_right=1), controller=controller))
    engine.duration = lambda scheduled: 0.25
    engine.add(make_request(0, 5, max_tokens=30))
    engine.step()
    for _ in range(8):
        engine.step()
    assert len(controller.steps) == 2 and controller.skipped == [(3, 0.75)]
    engine.add(make_request(1, 6, max_tokens=30))  # three are skipped by now, and were not told of yet
    engine.step()
    assert len(controller.steps) == 3 and controller.skipped == [(3, 0.75), (3, 0.75)]
    engine.step()
    assert len(controller.steps) == 4, "as many rows, but other tokens"


def test_steps_that_are_not_asked_about_count_with_what_usually_lies_between_steps():
    controller = Two(most=0, skips=3)
    run_apart(controller, *13 * [0.125])
    assert [taken.seconds for taken in controller.steps] == [0.375] * 4
    assert controller.skipped == [(3, 3 * 0.375)] * 3


def test_what_a_model_took_to_draft_in_a_step_is_the_proposers_time_and_not_the_steps(monkeypatch):
    controller = Two()
    engine = Engine(make_scheduler(proposer=Guesses(4, 1), controller=controller))
    engine.duration = controller.pass_quarter
    take_in = engine.scheduler.update_from_output

    def with_time(step: Step, output: ModelRunnerOutput, seconds: float) -> EngineCoreOutputs:
        return take_in(step, dataclasses.replace(output, drafting_s=0.0625), seconds)

    monkeypatch.setattr(engine.scheduler, "update_from_output", with_time)
    engine.add(make_request(0, 5, max_tokens=8))
    engine.step()
    engine.step()
    (taken,) = controller.steps
    assert (taken.seconds, taken.proposing_s) == (0.1875, 0.0625)


def test_a_step_lasts_from_the_one_before_it_but_the_engine_may_wait_between_them():
    controller = Two()
    run_apart(controller, 0.125, 0.125, 100.0)
    assert [taken.seconds for taken in controller.steps] == [0.375, 0.375, 0.5]


class Slow(Two):
    """It takes time to be asked, and to record a step."""

    def most_tokens(self, num_rows: int, num_other_tokens: int, max_seq_len: int) -> int:
        self.now_s += 0.125
        return self.most

    def record(self, step: SpeculatedStep) -> None:
        super().record(step)
        self.now_s += 0.125


@pytest.mark.parametrize(("most", "seconds"), [(0, [0.375] * 3), (5, [0.375, 0.5, 0.5])])
def test_what_a_controller_takes_counts_for_steps_with_drafts_alone(most: int, seconds: list[float]):
    """Plain decoding has no controller: steps for comparison would else make drafts seem to gain."""
    controller = Slow(most)
    run_apart(controller, 0.125, 0.125, 0.125)
    assert [taken.seconds for taken in controller.steps] == seconds
    assert [taken.proposing_s for taken in controller.steps] == [0.125 if most else 0.0] * 3


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("asked", [None, 7])
def test_a_step_has_no_more_drafts_than_memory_for_their_logits_is_planned(adaptive: bool, asked: int | None):
    more = {
        "max_num_seqs": 4, "budget": 1000, "max_model_len": 200, "num_blocks": 300, "max_step_drafts": asked,
        "controller": All() if adaptive else None,
    }  # fmt: skip
    engine = Engine(make_scheduler(proposer=Guesses(50, 50), **more))
    engine.add(*(make_request(handle, max_tokens=150) for handle in range(4)))
    engine.run()
    most = max(int(step.drafts.counts.sum()) for step in engine.scheduled if step.drafts is not None)
    assert most == most_drafts(4, asked) == (asked or 128)


def test_a_step_that_a_prompt_fills_is_plain_for_the_controller():
    controller = SpeculationController(3)
    engine = Engine(make_scheduler(proposer=Guesses(num_drafts=3, num_right=3), controller=controller, budget=8))
    engine.duration = lambda scheduled: 0.25
    engine.add(make_request(0, 4, max_tokens=30))
    engine.step()
    engine.add(make_request(1, 20, max_tokens=2))
    step = engine.step()
    assert step.num_scheduled_tokens.tolist() == [1, 7] and step.drafts is None
    engine.run()
    assert any(bucket.has_prompts for bucket in controller._guard.buckets)


class Noting(Guesses):
    """Notes which requests begin and end."""

    def __init__(self) -> None:
        super().__init__(2, 1)
        self.begun: list[int] = []
        self.ended: dict[int, list[int]] = {}

    def begin(self, request: EngineCoreRequest) -> None:
        self.begun.append(request.handle)

    def end(self, handle: int, token_ids: np.ndarray, num_prompt_tokens: int) -> None:
        self.ended[handle] = token_ids[num_prompt_tokens:].tolist()


def test_a_proposer_is_told_of_every_request_that_begins_and_ends():
    proposer = Noting()
    engine = Engine(make_scheduler(proposer=proposer))
    requests = [make_request(handle, 5, max_tokens=4) for handle in range(3)]
    engine.add(*requests)
    engine.scheduler.finish_requests([1], FinishReason.ABORT)
    engine.run()
    assert proposer.begun == [0, 1, 2]
    assert proposer.ended == {1: [], 0: engine.tokens[0], 2: engine.tokens[2]}


def test_beams_draft_nothing():
    engine = make_engine()
    engine.add(*make_beams((0, 1), [5, 6, 7], BeamSpec(num_beams=2), max_tokens=6))
    engine.run()
    assert all(step.drafts is None for step in engine.scheduled)


HYBRID = (FULL, ("state", 2))


def make_hybrid(num_right: int, num_states: int = 12, **options: Any) -> Engine:
    more = {"groups": HYBRID, "more_pools": [PoolSize(num_blocks=num_states)], **options}
    return Engine(make_scheduler(proposer=Guesses(3, num_right), **more), groups=HYBRID)


@pytest.mark.parametrize("num_right", [0, 1, 2, 3])
def test_a_row_goes_on_from_the_state_behind_the_last_draft_that_stands(num_right):
    """The worker of these tests holds the tokens of each state against those of its row."""
    engine = make_hybrid(num_right)
    request = make_request(0, max_tokens=14)
    engine.add(request)
    engine.step()
    free = engine.scheduler._kv.free_counts()[1]
    step = engine.step()
    (spare,) = step.drafts.state_block_ids
    assert len(set(spare.tolist())) == 3 and step.states[0].write_block_ids[0] not in spare
    assert engine.scheduler._kv.free_counts()[1] == free, "the others are free again"
    engine.run()
    assert engine.tokens[0] == expected_answer(request, 100)[0]


@pytest.mark.parametrize("num_right", [0, 1, 2, 3])
def test_states_are_kept_at_full_blocks_that_drafts_have_reached_and_none_behind_wrong_ones(num_right):
    engine = make_hybrid(num_right, num_states=20)
    first = make_request(0, 4, max_tokens=23)
    engine.add(first)
    engine.run()
    tokens = [*first.prompt_token_ids.tolist(), *engine.tokens[0]]
    second = make_request(1, [*tokens, 7], max_tokens=4)
    engine.add(second)
    engine.run()
    assert engine.tokens[1] == expected_answer(second, 100)[0]
    assert engine.stats[-2].prefix_cache_hits == 24 or any(stats.prefix_cache_hits == 24 for stats in engine.stats)


def test_drafts_take_no_state_that_a_request_uses_and_are_fewer_where_blocks_are_short():
    engine = make_hybrid(3, num_states=5, prefix_caching=False)
    requests = [make_request(handle, max_tokens=max_tokens) for handle, max_tokens in enumerate((6, 9, 24))]
    engine.add(*requests)
    engine.run()
    assert engine.num_preemptions == 0
    drafting = [step for step in engine.scheduled if step.drafts is not None]
    assert all(step.drafts.counts.sum() + len(step.rows) <= 4 for step in drafting), "the null block is one of five"
    assert {int(step.drafts.counts.sum()) for step in drafting} == {1, 2, 3}, "more, as others end"
    assert all(engine.tokens[one.handle] == expected_answer(one, 100)[0] for one in requests)


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_where_a_plan_has_counted_drafts_every_request_that_may_run_has_blocks_for_some(prefix_caching):
    """In no more memory than what the plan says is of use."""
    max_num_seqs, block_size, max_len = 6, 4, 100
    cache = CacheConfig(block_size=block_size, enable_prefix_caching=prefix_caching, num_state_checkpoints=0)
    specs = {f"layer{i}": make_spec(*group, block_size) for i, group in enumerate(HYBRID)}
    num_bytes = useful_bytes(specs, cache, max_len, max_num_seqs, num_drafts=3)
    attention, states = plan_kv_cache(specs, num_bytes, cache, max_len, None, max_num_seqs, 3).pool_sizes()
    engine = make_hybrid(
        3, states.num_blocks, num_blocks=attention.num_blocks, max_num_seqs=max_num_seqs, block_size=block_size,
        max_model_len=max_len, prefix_caching=prefix_caching,
    )  # fmt: skip
    engine.add(*(make_request(handle, max_tokens=90) for handle in range(max_num_seqs)))
    engine.run()
    assert engine.num_preemptions == 0
    decoding = [step for step in engine.scheduled if len(step.rows) == max_num_seqs and not step.is_prefill.any()]
    numbers = [0 if step.drafts is None else int(step.drafts.counts.sum()) for step in decoding]
    assert min(numbers[:-1]) >= DRAFTS_PER_REQUEST * max_num_seqs, "but for the one that ends the answers"


@settings(max_examples=EXAMPLES // 2, deadline=None)
@given(scheduler_settings(), scripts(), st.sampled_from(["fcfs", "priority", "fair", "shortest"]))
def test_whatever_is_drafted_every_request_ends_with_its_own_answer_and_no_page_is_misused(config, script, policy):
    engine, accepted = play({**config, "scheduling_policy": policy, "proposer": Guesses()}, script)
    check_answers(engine, accepted)
    assert engine.scheduler._kv.usage == 0.0
    assert engine.scheduler.reset_prefix_cache()


class Looks(Two):
    """A controller that has closed the load, and looks at two drafts of a row each time that it is asked."""

    def __init__(self) -> None:
        super().__init__(most=0)
        self.looks: list[tuple[list[int], list[int]]] = []

    def num_watched(self) -> int:
        return 2

    def observe(self, load: StepLoad, proposals: Proposals, accepted: np.ndarray) -> None:
        self.looks.append((proposals.counts.tolist(), accepted.tolist()))


@pytest.mark.parametrize("num_right", [0, 1, 2])
def test_a_look_is_settled_by_the_tokens_that_come_and_changes_no_step(num_right):
    controller = Looks()
    engine = Engine(make_scheduler(proposer=Guesses(num_drafts=4, num_right=num_right), controller=controller))
    requests = [make_request(handle, 5, max_tokens=12) for handle in range(6)]
    engine.add(*requests)
    engine.run()
    assert all(engine.tokens[one.handle] == expected_answer(one, 100)[0] for one in requests)
    assert all(step.drafts is None for step in engine.scheduled)
    assert len(controller.looks) >= 3, "one every two tokens"
    assert set(map(str, controller.looks[:3])) == {str(([2] * 4, [num_right] * 4))}, "of four rows"


def test_a_look_that_finds_nothing_is_repeated_in_the_next_step_as_models_draft_for_that(monkeypatch):
    controller, asked = Looks(), list[int]()

    class Late(Guesses):
        """Has drafts every second time that it is asked."""

        def propose(self, rows: DraftRows) -> Proposals:
            asked.append(int(rows.num_tokens[0]))
            return super().propose(rows) if len(asked) % 2 == 0 else make_proposals([NO_TOKENS] * len(rows.rows))

    monkeypatch.setattr(controller, "num_watched", lambda: 0 if asked else 2)
    controller.skips = 1000  # the look is settled all the same
    engine = Engine(make_scheduler(proposer=Late(num_drafts=4, num_right=2), controller=controller))
    engine.add(make_request(0, 5, max_tokens=12))
    engine.run()
    assert asked[:2] == [6, 7] and controller.looks[0] == ([2], [2])
