"""Policies: who is served first, and who has to make room for whom."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core.engine_messages import MAX_PRIORITY
from quire.core.request import Request
from quire.core.stats import EventKind
from quire.errors import ConfigError
from quire.scheduler.policy import ARRIVAL_BITS, ByArrival, ByPriority
from quire.scheduler.request_table import RequestTable
from quire.scheduler.scheduling_policy import make_scheduling_policy
from tests.unit.scheduler.harness import Engine, expected_answer, make_request, make_scheduler

ARRIVALS = st.integers(0, (1 << ARRIVAL_BITS) - 1)
PRIORITIES = st.integers(-MAX_PRIORITY, MAX_PRIORITY)


def prioritised(**settings: object) -> Engine:
    defaults: dict[str, object] = {"num_blocks": 64, "block_size": 4, "max_model_len": 100, "max_num_seqs": 2}
    return Engine(make_scheduler(**{**defaults, **settings}, scheduling_policy="priority"))  # type: ignore[arg-type]


def order_of(engine: Engine, kind: EventKind) -> list[int]:
    return [event.handle for event in engine.events if event.kind is kind]


def assert_own_answers(engine: Engine, *requests: object) -> None:
    for request in requests:
        assert engine.tokens[request.handle] == expected_answer(request, 100)[0]  # type: ignore[attr-defined,arg-type]


@given(st.tuples(PRIORITIES, ARRIVALS), st.tuples(PRIORITIES, ARRIVALS))
def test_ranks_order_by_priority_and_then_by_arrival(one, other):
    rank = ByPriority()
    ranks = [
        rank(Request.from_message(make_request(0, priority=priority)), arrival) for priority, arrival in (one, other)
    ]
    assert (ranks[0] < ranks[1]) == (one < other)
    array = np.array(ranks, dtype=np.int64)  # both fit
    assert rank.has_lower_priority(array, ranks[0]).tolist() == [False, other[0] > one[0]]


@given(PRIORITIES, ARRIVALS, ARRIVALS)
def test_by_arrival_all_are_of_one_class(priority, one, other):
    rank = ByArrival()
    ranks = [rank(Request.from_message(make_request(0, priority=priority)), arrival) for arrival in (one, other)]
    assert ranks == [one, other] and not rank.has_lower_priority(np.array(ranks), min(ranks)).any()


def test_an_unknown_policy_is_refused_with_the_nearest_name():
    with pytest.raises(ConfigError, match="did you mean 'fcfs'"):
        make_scheduling_policy("fcf", RequestTable(1, 8), make_scheduler()._kv)


def test_waiting_requests_are_served_by_priority():
    engine = prioritised(max_num_seqs=1)
    engine.add(*(make_request(handle, priority=priority) for handle, priority in enumerate((3, -1, 3, 0))))
    engine.run()
    assert order_of(engine, EventKind.SCHEDULED) == [1, 3, 0, 2]
    assert not engine.num_preemptions


def test_an_urgent_arrival_takes_the_row_of_the_laxest_at_once():
    engine = prioritised()
    requests = [make_request(handle, 6, max_tokens=30, priority=priority) for handle, priority in enumerate((5, 7))]
    engine.add(*requests)
    for _ in range(3):
        engine.step()
    urgent = make_request(9, 6, max_tokens=5, priority=-2)
    engine.add(urgent)
    engine.step()
    assert order_of(engine, EventKind.SCHEDULED) == [0, 1, 9]
    assert order_of(engine, EventKind.PREEMPTED) == [1]
    engine.run()
    assert_own_answers(engine, *requests, urgent)
    assert engine.num_preemptions == 1


def test_an_urgent_arrival_takes_pages_of_as_many_as_it_needs_and_no_more():
    engine = prioritised(num_blocks=13, max_num_seqs=8, prefix_caching=False)
    requests = [make_request(handle, 12, max_tokens=4, priority=handle) for handle in (1, 2, 3)]
    engine.add(*requests)
    engine.step()
    urgent = make_request(9, 20, max_tokens=3, priority=0)
    engine.add(urgent)
    engine.step()
    assert order_of(engine, EventKind.PREEMPTED) == [3, 2]
    assert order_of(engine, EventKind.SCHEDULED)[-1] == 9
    engine.run()
    assert_own_answers(engine, *requests, urgent)


def test_the_same_priority_takes_nothing():
    engine = prioritised(max_num_seqs=1)
    engine.add(make_request(0, max_tokens=20, priority=1))
    engine.step()
    engine.add(make_request(1, priority=1))
    engine.run()
    assert not engine.num_preemptions


def test_nobody_is_stopped_for_one_that_would_not_fit_even_then():
    engine = prioritised(num_blocks=13, max_num_seqs=8, prefix_caching=False)
    engine.add(make_request(0, 28, max_tokens=3, priority=0), make_request(1, 4, max_tokens=10, priority=9))
    engine.step()
    engine.add(make_request(2, 28, max_tokens=3, priority=5))  # 0 keeps seven blocks
    engine.step()
    assert not engine.num_preemptions
    engine.run()


def test_a_long_lax_prompt_waits_while_an_urgent_one_comes_in():
    engine = prioritised(num_blocks=64, max_num_seqs=4, budget=8)
    lax, urgent = make_request(0, 60, priority=1), make_request(1, 7, max_tokens=2, priority=0)
    engine.add(lax)
    engine.step()
    engine.add(urgent)
    engine.step()
    assert engine.scheduled[-1].num_scheduled_tokens.tolist() == [7], "the lax prompt waits"
    engine.step()
    assert engine.scheduled[-1].num_scheduled_tokens.tolist() == [1, 7], "it goes on beside"
    engine.run()
    assert_own_answers(engine, lax, urgent)
    assert not engine.num_preemptions


def test_a_gate_that_holds_the_urgent_one_back_stops_nobody():
    from quire.scheduler.admission import GateDecision

    engine = prioritised(
        max_num_seqs=1, gates=(lambda one, plan: GateDecision.SKIP if one.request.handle else GateDecision.GO,)
    )
    engine.add(make_request(0, 30, max_tokens=3, priority=1))
    engine.step()
    engine.add(make_request(1, priority=0))
    for _ in range(6):
        engine.step()
    assert not engine.num_preemptions and len(engine.tokens[0]) == 3
