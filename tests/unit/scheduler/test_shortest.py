"""The policy `shortest`: the least work first, and nobody passed more often than the bound says."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.core.request import Request
from quire.core.stats import EventKind
from quire.scheduler.policy import AGE_TOKENS, NUM_ANSWERS_AVERAGED, ExpectedOutputs, ShortestFirst
from tests.unit.scheduler.harness import Engine, expected_answer, make_request, make_scheduler


def shortest(**settings: object) -> Engine:
    defaults: dict[str, object] = {"num_blocks": 64, "block_size": 4, "max_model_len": 100, "max_num_seqs": 1}
    return Engine(make_scheduler(**{**defaults, **settings}, scheduling_policy="shortest"))  # type: ignore[arg-type]


def order_scheduled(engine: Engine) -> list[int]:
    return [event.handle for event in engine.events if event.kind is EventKind.SCHEDULED]


def test_the_least_work_is_first_be_it_prompt_or_answer():
    engine = shortest()
    engine.add(
        make_request(0, 60, max_tokens=3),
        make_request(1, 5, max_tokens=40),
        make_request(2, 5, max_tokens=3),
        make_request(3, 30, max_tokens=3),
    )
    engine.run()
    assert order_scheduled(engine) == [2, 3, 1, 0]


def test_what_is_cached_of_a_prompt_is_no_work():
    engine = shortest()
    text = [7] * 60
    engine.add(make_request(0, text, max_tokens=2))
    engine.run()
    engine.add(make_request(1, 30, max_tokens=2), make_request(2, text, max_tokens=2))
    engine.run()
    assert order_scheduled(engine) == [0, 2, 1]


def test_a_request_that_is_continued_counts_what_is_left():
    work = ShortestFirst(ExpectedOutputs(), make_scheduler()._kv).work
    message = make_request(0, 10, max_tokens=50)
    assert work(Request.from_message(message)) == 60
    continued = dataclasses.replace(message, output_token_ids=np.arange(40, dtype=np.int32))
    assert work(Request.from_message(continued)) == 50 + 10


def test_answers_that_end_early_make_others_expected_to():
    expected = ExpectedOutputs()
    params = make_request(0, max_tokens=1000, ignore_eos=False).sampling_params
    assert expected.of(params) == 1000
    for _ in range(5 * NUM_ANSWERS_AVERAGED):
        expected.note_answer(params, 100)
    assert 100 <= expected.of(params) < 110
    assert expected.of(make_request(0, max_tokens=1000, ignore_eos=True).sampling_params) == 1000


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 80), st.integers(1, 19)), min_size=2, max_size=60), st.integers(1, 3))
def test_a_request_is_passed_by_fewer_later_ones_than_its_work_allows(sizes, num_rows):
    engine = shortest(max_num_seqs=num_rows, prefix_caching=False)
    works = [length + max_tokens for length, max_tokens in sizes]
    for handle, (length, max_tokens) in enumerate(sizes):
        engine.add(make_request(handle, length, max_tokens=max_tokens))
    engine.run()
    place = {handle: i for i, handle in enumerate(order_scheduled(engine))}
    for handle, work in enumerate(works):
        passed_by = sum(1 for later in range(handle + 1, len(works)) if place[later] < place[handle])
        assert passed_by < max(1, work / AGE_TOKENS)


def test_short_requests_that_never_stop_coming_starve_no_long_one():
    engine = shortest()
    long = make_request(0, 80, max_tokens=19)
    engine.add(make_request(1, 4, max_tokens=2), long)
    handles = itertools.count(2)
    num_later = 0
    while not engine.tokens[0]:
        if len(engine.scheduler._queue) < 5:
            engine.add(make_request(next(handles), 4, max_tokens=2))
            num_later += 1
        engine.step()
        assert num_later <= (80 + 19) / AGE_TOKENS + 6
    engine.run()
    assert engine.tokens[0] == expected_answer(long, 100)[0]
