from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from quire.core.engine_messages import EngineCoreRequest, FinishReason
from quire.core.scheduler_output import SchedulerOutput
from tests.unit.scheduler.harness import Engine, expected_answer, make_request, make_scheduler, make_siblings

PROMPT = list(range(200, 222))  # five full blocks and a partial one


def make_engine(**settings: Any) -> Engine:
    return Engine(make_scheduler(**{"num_blocks": 100, "budget": 200, "prefix_caching": False, **settings}))


def num_prompt_tokens_computed(steps: list[SchedulerOutput], num_prompt_tokens: int) -> int:
    """Prompt tokens of all requests that these steps computed."""
    num_tokens = 0
    for step in steps:
        ends = np.minimum(step.num_computed_tokens + step.num_scheduled_tokens, num_prompt_tokens)
        num_tokens += int(np.maximum(ends - step.num_computed_tokens, 0).sum())
    return num_tokens


def check_answers(engine: Engine, requests: list[EngineCoreRequest], max_model_len: int = 100) -> None:
    for request in requests:
        answer, end = expected_answer(request, max_model_len)
        assert (engine.tokens[request.handle], engine.finished[request.handle]) == (answer, end)


CASES: dict[str, dict[str, Any]] = {
    "caching off": {},
    "caching on": {"prefix_caching": True},
    "not reading the cache": {"prefix_caching": True, "skip_reading_prefix_cache": True},
    "with a salt": {"prefix_caching": True, "cache_salt": "salt"},
    "in chunks": {"budget": 7},
    "one token each": {"max_tokens": 1},
    "page by page": {"block_size": 1, "num_blocks": 300},
}


@pytest.mark.parametrize("length", [2, 3, 4, 5, 21, 22])
@pytest.mark.parametrize("case", CASES)
def test_the_prompt_of_many_answers_is_computed_once(case: str, length: int):
    settings = dict(CASES[case])
    params = {name: settings.pop(name) for name in ("skip_reading_prefix_cache", "cache_salt") if name in settings}
    max_tokens = settings.pop("max_tokens", 9)
    engine = make_engine(**settings)
    family = make_siblings(range(6), PROMPT[:length], max_tokens=max_tokens, **params)
    engine.add(*family)
    engine.run()
    check_answers(engine, family)
    # The last token is computed by each, for its logits.
    assert num_prompt_tokens_computed(engine.scheduled, length) == length + 5
    block_size = settings.get("block_size", 4)
    assert engine.worker.num_copies == (0 if (length - 1) % block_size == 0 else 5)


def test_sixteen_answers_to_2000_tokens_hold_little_more_than_one_prompt_and_their_outputs():
    engine = make_engine(
        num_blocks=400, block_size=16, max_model_len=2100, max_num_seqs=16, budget=512, enable_chunked_prefill=True
    )
    num_output_tokens = 32
    engine.add(*make_siblings(range(16), [i % 90 for i in range(2000)], max_tokens=num_output_tokens))
    most = 0
    while engine.step() is not None:
        pool = engine.scheduler._kv._pool
        most = max(most, pool.num_usable_blocks - pool.num_free_blocks)
    assert 125 + 16 * 2 <= most <= 1.15 * 125 + 16 * num_output_tokens / 16


def test_siblings_of_other_prompts_or_without_a_group_share_nothing():
    engine = make_engine()
    engine.add(*make_siblings([0, 1], PROMPT), *make_siblings([2, 3], PROMPT), make_request(4, PROMPT))
    engine.run()
    assert num_prompt_tokens_computed(engine.scheduled, len(PROMPT)) == 3 * len(PROMPT) + 2


@pytest.mark.parametrize("num_steps", [1, 2, 3, 6])
def test_when_the_first_is_aborted_the_others_go_on(num_steps: int):
    engine = make_engine(budget=8)
    family = make_siblings(range(4), PROMPT, max_tokens=6)
    engine.add(*family)
    for _ in range(num_steps):
        engine.step()
    engine.abort(0)
    engine.run()
    check_answers(engine, family[1:])
    assert engine.finished[0].finish_reason is FinishReason.ABORT
    num_prompts = 1 if num_steps >= 3 else 2  # the prompt takes three steps
    assert num_prompt_tokens_computed(engine.scheduled, len(PROMPT)) <= num_prompts * len(PROMPT) + 3


def test_the_pages_of_a_prompt_are_kept_until_the_last_sibling_has_them_and_then_go():
    engine = make_engine(max_num_seqs=1)
    family = make_siblings(range(3), PROMPT, max_tokens=5)
    engine.add(*family)
    engine.run()
    check_answers(engine, family)
    assert num_prompt_tokens_computed(engine.scheduled, len(PROMPT)) == len(PROMPT) + 2
    assert engine.scheduler._kv.usage == 0.0


def test_when_the_waiting_siblings_are_aborted_what_was_kept_for_them_goes():
    engine = make_engine(max_num_seqs=1)
    engine.add(*make_siblings(range(3), PROMPT, max_tokens=1), make_request(9, 3, max_tokens=3, priority=0))
    engine.step()
    assert engine.finished.keys() == {0} and engine.scheduler._kv.usage > 0
    engine.abort(1, 2)
    assert engine.scheduler._kv.usage == 0.0
    engine.run()


def test_kept_pages_are_given_up_before_anybody_is_preempted_or_waits_forever():
    engine = make_engine(num_blocks=12, max_num_seqs=2)
    running = make_request(9, 3, max_tokens=30)
    family = make_siblings([0, 1], PROMPT, max_tokens=1)
    engine.add(running)
    engine.step()
    engine.add(*family)
    engine.step()
    assert engine.finished.keys() == {0}
    engine.add(make_request(5, 8, max_tokens=2))
    engine.run()
    check_answers(engine, [running, *family])
    engine = make_engine(num_blocks=8, max_num_seqs=1, scheduling_policy="priority")
    family = make_siblings([0, 1], PROMPT, max_tokens=1)
    preempting = make_request(5, 26, max_tokens=2, priority=-1)
    engine.add(*family)
    engine.step()
    engine.add(preempting)
    engine.run()
    check_answers(engine, [*family, preempting])
    assert engine.num_preemptions == 0


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_the_first_one_may_be_preempted_before_the_others_come(prefix_caching: bool):
    engine = make_engine(
        num_blocks=12, max_num_seqs=6, budget=8, prefix_caching=prefix_caching, scheduling_policy="priority"
    )
    family = make_siblings(range(3), PROMPT, max_tokens=6)
    engine.add(*family)
    engine.step()
    preempting = [make_request(handle, 20, max_tokens=10, priority=-1) for handle in (7, 8)]
    engine.add(*preempting)
    engine.run()
    check_answers(engine, [*family, *preempting])
    assert engine.num_preemptions > 0


def test_an_answer_whose_prompt_logprobs_are_wanted_computes_its_own_prompt():
    engine = make_engine()
    engine.add(*make_siblings([0, 1], PROMPT), make_request(2, PROMPT, fork_group=0, prompt_logprobs=1))
    engine.run()
    assert num_prompt_tokens_computed(engine.scheduled, len(PROMPT)) == 2 * len(PROMPT) + 1


def test_a_failed_step_between_fork_and_copy_leaves_no_page_behind():
    engine = make_engine()
    family = make_siblings(range(3), PROMPT, max_tokens=6)
    engine.add(*family)
    engine.step()
    step = engine.scheduler.schedule()
    assert step is not None and len(step.output.block_copies) == 2
    engine.scheduler.abandon_step(step)
    assert engine.scheduler._kv.usage == 0.0
    engine.worker._apply(step.output)  # the worker failed after that
    engine.run()
    check_answers(engine, family)
