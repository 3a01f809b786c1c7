"""Requests that sit out steps keep their rows, hold up nobody, and go on as if nothing had been."""

from __future__ import annotations

import numpy as np

from tests.unit.scheduler.harness import Engine, expected_answer, make_request, make_scheduler


def started(num_reqs: int, **settings: object) -> Engine:
    engine = Engine(make_scheduler(max_model_len=40, **settings))  # type: ignore[arg-type]
    engine.add(*(make_request(handle, 7, max_tokens=12) for handle in range(num_reqs)))
    engine.step()
    return engine


def test_a_held_request_gets_no_tokens_and_the_others_go_on_to_their_ends():
    engine = started(3)
    engine.scheduler.hold([1])
    for _ in range(11):
        scheduled = engine.step()
        assert scheduled is not None and len(scheduled.rows) == 2
    assert set(engine.finished) == {0, 2} and len(engine.tokens[1]) == 1
    assert engine.step() is None and engine.scheduler.has_unfinished_requests()
    engine.scheduler.hold(())
    engine.run()
    assert engine.tokens[1] == expected_answer(make_request(1, 7, max_tokens=12), 40)[0]
    assert engine.num_preemptions == 0


def test_a_held_request_can_lose_its_row_and_has_the_same_answer():
    engine = started(4, num_blocks=9, block_size=4)
    engine.scheduler.hold([0, 3])
    while not engine.num_preemptions:
        assert engine.step() is not None
    engine.scheduler.hold(())
    engine.run()
    for handle in range(4):
        assert engine.tokens[handle] == expected_answer(make_request(handle, 7, max_tokens=12), 40)[0]


def test_an_unknown_handle_holds_up_nobody():
    engine = started(1)
    engine.scheduler.hold(np.array([5, 9]).tolist())
    engine.run()
    assert len(engine.tokens[0]) == 12
