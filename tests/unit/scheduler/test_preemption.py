from __future__ import annotations

from quire.core.stats import EventKind
from tests.unit.scheduler.harness import Engine, expected_answer, make_request, make_scheduler

QUEUED, SCHEDULED, PREEMPTED = EventKind.QUEUED, EventKind.SCHEDULED, EventKind.PREEMPTED


def crowded(num_reqs: int = 3, num_blocks: int = 8, **settings: object) -> Engine:
    """Requests that start together, and a pool that cannot hold all of them to their end."""
    scheduler = make_scheduler(num_blocks=num_blocks, block_size=4, max_model_len=40, **settings)  # type: ignore[arg-type]
    engine = Engine(scheduler)
    engine.add(*(make_request(handle, 7, max_tokens=12) for handle in range(num_reqs)))
    return engine


def preempted_handles(engine: Engine) -> list[int]:
    return [event.handle for event in engine.events if event.kind is PREEMPTED]


def test_the_victim_is_the_request_that_arrived_last():
    engine = crowded()
    while not engine.num_preemptions:
        engine.step()
    assert preempted_handles(engine) == [2]


def test_the_victim_is_the_last_arrived_also_when_it_came_back_before():
    engine = crowded()
    engine.run()
    victims = preempted_handles(engine)
    assert victims.count(2) >= 2
    assert 0 not in victims


def test_preempted_requests_get_the_same_answers_as_alone():
    engine = crowded(4)
    engine.run()
    assert engine.num_preemptions > 0
    for handle in range(4):
        assert engine.tokens[handle] == expected_answer(make_request(handle, 7, max_tokens=12), 40)[0]


def test_a_preempted_request_goes_back_before_later_arrivals():
    engine = crowded()
    while not engine.num_preemptions:
        engine.step()
    engine.add(make_request(3, 7, max_tokens=1))
    engine.run()
    scheduled = [event.handle for event in engine.events if event.kind is SCHEDULED]
    assert scheduled[-1] == 3
    assert engine.events_of(2)[:4] == [QUEUED, SCHEDULED, PREEMPTED, SCHEDULED]


def test_nobody_is_admitted_in_a_step_that_preempted():
    engine = crowded(4, max_num_seqs=3)
    while not engine.num_preemptions:
        engine.step()
    assert engine.scheduled[-1].new_reqs == ()


def test_the_victim_s_row_is_reported_free_and_its_planned_token_is_refunded():
    engine = crowded()
    while not engine.num_preemptions:
        engine.step()
    last = engine.scheduled[-1]
    assert last.freed_rows.tolist() == [2]
    assert last.rows.tolist() == [0, 1]
    assert last.total_num_scheduled_tokens == 2


def test_a_row_freed_and_given_to_another_request_in_one_message_is_safe_in_the_promised_order():
    engine = Engine(make_scheduler(max_num_seqs=1))
    engine.add(make_request(0, 9, max_tokens=1), make_request(1, 6, max_tokens=2))
    engine.step()
    message = engine.step()
    assert message is not None
    assert message.freed_rows.tolist() == [0] == [new.row for new in message.new_reqs]
    engine.run()
    assert len(engine.tokens[1]) == 2


def test_a_returning_request_brings_all_its_tokens_and_finds_its_pages_if_they_are_left():
    engine = crowded()
    while not engine.num_preemptions:
        engine.step()
    engine.abort(0)
    message = engine.step()
    assert message is not None
    (back,) = message.new_reqs
    assert back.num_prompt_tokens == 7
    assert back.token_ids.tolist()[7:] == engine.tokens[2][: len(back.token_ids) - 7]
    assert message.num_computed_tokens[message.rows == back.row][0] > 0


def test_the_number_of_cached_prompt_tokens_is_that_of_the_first_admission():
    engine = crowded()
    engine.run()
    assert {event.num_cached_tokens for event in engine.events} == {0}
    assert sum(stats.prefix_cache_queries for stats in engine.stats) == 3 * 7
    assert sum(stats.prefix_cache_hits for stats in engine.stats) == 0


def test_preemptions_are_counted_once():
    engine = crowded()
    engine.run()
    assert engine.num_preemptions == len(preempted_handles(engine)) > 0
