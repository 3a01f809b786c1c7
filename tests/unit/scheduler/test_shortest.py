"""The policy `shortest`: the least work first, and nobody passed more often than the bound says."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.core.engine_messages import EngineCoreRequest
from quire.core.request import Request
from quire.core.stats import EventKind
from quire.scheduler.policy import AGE_TOKENS, NUM_ANSWERS_AVERAGED, ExpectedOutputs, ShortestFirst
from tests.robustness.scheduler_properties import later_starts
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
        if len(engine.scheduler._order.queue) < 5:
            engine.add(make_request(next(handles), 4, max_tokens=2))
            num_later += 1
        engine.step()
        assert num_later <= (80 + 19) / AGE_TOKENS + 6
    engine.run()
    assert engine.tokens[0] == expected_answer(long, 100)[0]


def running_long(num_steps: int, **options: object) -> tuple[Engine, EngineCoreRequest]:
    """A request of 80 + 19 tokens that has the only row for so many steps already."""
    engine = shortest(**options)
    long = make_request(0, 80, max_tokens=19)
    engine.add(long)
    for _ in range(num_steps):
        engine.step()
    return engine, long


def test_a_long_request_yields_to_a_short_one_and_goes_on_with_the_same_tokens():
    engine, long = running_long(3)
    engine.add(make_request(1, 4, max_tokens=2))
    engine.run()
    assert order_scheduled(engine) == [0, 1, 0]
    assert engine.events_of(0).count(EventKind.PREEMPTED) == 1
    assert engine.tokens[0] == expected_answer(long, 100)[0]


def test_a_long_request_gives_its_pages_to_a_short_one():
    engine = shortest(max_num_seqs=4, num_blocks=30, prefix_caching=False)
    longs = [make_request(handle, 50, max_tokens=49) for handle in range(2)]
    engine.add(*longs)
    for _ in range(3):
        engine.step()
    engine.add(make_request(2, 16, max_tokens=2))
    engine.run()
    assert order_scheduled(engine)[:3] == [0, 1, 2] and engine.events_of(1)[:3].count(EventKind.PREEMPTED) == 1
    assert all(engine.tokens[one.handle] == expected_answer(one, 100)[0] for one in longs)


def test_a_request_that_is_about_to_end_is_not_stopped():
    engine, _ = running_long(17)
    engine.add(make_request(1, 4, max_tokens=2))
    engine.run()
    assert order_scheduled(engine) == [0, 1]


def test_requests_of_about_the_same_length_do_not_stop_each_other():
    engine, _ = running_long(3)
    engine.add(make_request(1, 60, max_tokens=19))
    engine.run()
    assert order_scheduled(engine) == [0, 1]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 70), st.integers(1, 25), st.integers(0, 12)), min_size=2, max_size=50),
    st.integers(1, 3),
    st.sampled_from(["recompute", "swap"]),
)
def test_fewer_later_requests_than_the_bound_start_while_one_waits_stopped_or_not(arrivals, num_rows, mode):
    engine = shortest(
        max_num_seqs=num_rows, prefix_caching=False, num_blocks=40, preemption_mode=mode, num_swap_blocks=100
    )
    num_events_before = []
    for handle, (length, max_tokens, gap) in enumerate(arrivals):
        for _ in range(gap):
            engine.step()
        num_events_before.append(len(engine.events))
        engine.add(make_request(handle, length, max_tokens=max_tokens))
    engine.run()
    for handle, (length, max_tokens, _) in enumerate(arrivals):
        passed_by = later_starts(engine.events[num_events_before[handle] :], handle)
        assert len(passed_by) < max(1, (length + max_tokens) / AGE_TOKENS)


def test_a_long_request_ends_under_short_ones_that_never_stop_coming():
    engine, long = running_long(2)
    handles = itertools.count(1)
    while 0 not in engine.finished:
        if len(engine.scheduler._order.queue) < 3:
            engine.add(make_request(next(handles), 4, max_tokens=2))
        engine.step()
    num_stops = engine.events_of(0).count(EventKind.PREEMPTED)
    assert 1 <= num_stops < (80 + 19) / AGE_TOKENS
    assert len(engine.finished) <= (80 + 19) / AGE_TOKENS + num_stops
    assert engine.tokens[0] == expected_answer(long, 100)[0]
