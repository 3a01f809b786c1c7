"""Whatever a connector loads late, loses or raises, every request gets its answer and every block is freed."""

from __future__ import annotations

import zlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.core.engine_messages import FinishReason
from quire.errors import ValidationError
from quire.scheduler.waiting import WaitReason
from tests.unit.kv_transfer.scripted_connector import ScriptedConnector, make_engine
from tests.unit.scheduler import test_properties as properties
from tests.unit.scheduler.harness import Engine, expected_answer, make_request
from tests.unit.scheduler.test_steps_in_flight import LateEngine

PROMPT = [5, 6, 7, 8, 9] * 5
MODES = pytest.mark.parametrize("is_async", [False, True], ids=["in the step", "before it"])


def answer_to(handle: int) -> list[int]:
    return expected_answer(make_request(handle, PROMPT, max_tokens=4), 64)[0]


def settle(engine: Engine) -> None:
    while engine.scheduler._tiers.is_waiting:
        engine.step()
    if isinstance(engine, LateEngine):
        engine.drain()


def filled(**options: Any) -> tuple[Engine, ScriptedConnector, ScriptedConnector]:
    """An engine whose connector has the blocks of `PROMPT`, and whose cache has nothing."""
    engine, front, back = make_engine(**options)
    engine.add(make_request(0, PROMPT, max_tokens=4))
    engine.run()
    settle(engine)
    assert len(front.known) == 7 and engine.scheduler.reset_prefix_cache()
    engine.scheduled.clear()
    return engine, front, back


def num_computed(engine: Engine) -> int:
    return sum(message.total_num_scheduled_tokens for message in engine.scheduled)


def run(engine: Engine, *handles: int) -> None:
    engine.add(*(make_request(handle, PROMPT, max_tokens=4) for handle in handles))
    engine.run()
    settle(engine)


@MODES
def test_what_was_saved_is_loaded_and_not_computed(is_async):
    engine, front, _ = filled()
    front.is_async = lambda request_id: is_async
    run(engine, 1)
    assert engine.tokens[1] == answer_to(1)
    assert num_computed(engine) == 1 + 3 and engine.scheduler._kv.usage == 0.0


def test_a_request_that_waits_holds_up_no_other():
    engine, front, back = filled()
    front.is_async, back.delay = (lambda request_id: request_id == "r1-1"), (lambda number: 6)
    engine.add(make_request(1, PROMPT, max_tokens=4), make_request(2, 6, max_tokens=3))
    engine.run()
    assert list(engine.finished)[1:] == [2, 1] and engine.tokens[1] == answer_to(1)


def test_a_request_of_which_it_is_not_known_yet_is_asked_for_again():
    engine, front, _ = filled()
    front.knows_late = 3
    engine.add(make_request(1, PROMPT, max_tokens=4))
    step = engine.scheduler.schedule()
    assert step is not None and step.plan.blocked is not None
    assert step.plan.blocked.reason is WaitReason.WAITING_FOR_REMOTE_KVS and not len(step.output.rows)
    engine.receive(engine.scheduler.update_from_output(step, engine.worker.execute(step.output)))
    engine.run()
    assert engine.tokens[1] == answer_to(1) and front.lookups["r1-1"] == 4 and num_computed(engine) == 4


def test_what_the_connector_gives_a_response_comes_with_the_end_of_its_request():
    engine, front, _ = make_engine()
    front.params = {"remote_engine_id": "x"}
    run(engine, 0)
    assert engine.finished[0].kv_transfer_params == {"remote_engine_id": "x"}


@MODES
def test_what_could_not_be_loaded_is_computed(is_async):
    engine, front, back = filled()
    front.is_async, back.fails = (lambda request_id: is_async), (lambda number: True)
    run(engine, 1)
    assert engine.tokens[1] == answer_to(1) and num_computed(engine) >= len(PROMPT) + 3
    assert engine.scheduler._kv.usage == 0.0


@MODES
def test_what_could_not_be_loaded_ends_the_request_where_that_is_asked_for(is_async):
    engine, front, back = filled(transfer={"kv_load_failure_policy": "fail"})
    front.is_async, back.fails = (lambda request_id: is_async), (lambda number: number == 1)
    run(engine, 1)
    assert engine.finished[1].finish_reason is FinishReason.ERROR
    assert "could not be loaded" in str(engine.finished[1].error)
    assert engine.scheduler._kv.usage == 0.0


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_a_load_that_takes_too_long_is_not_waited_for_and_keeps_its_blocks_until_it_is_reported(policy):
    now = [0.0]
    engine, front, back = filled(
        clock=lambda: now[0], transfer={"kv_load_timeout_s": 5.0, "kv_load_failure_policy": policy}
    )
    front.is_async, back.delay = (lambda request_id: True), (lambda number: 30 if number == 1 else 0)
    engine.add(make_request(1, PROMPT, max_tokens=4))
    for _ in range(3):
        engine.step()
    assert num_computed(engine) == 0
    now[0] = 6.0
    while 1 not in engine.finished:
        engine.step()
    assert engine.scheduler._kv.usage >= 6 / 39
    if policy == "recompute":
        assert engine.tokens[1] == answer_to(1)
    else:
        assert engine.finished[1].finish_reason is FinishReason.ERROR
    settle(engine)
    assert engine.scheduler._kv.usage == 0.0


def test_blocks_of_an_aborted_load_and_of_a_save_are_free_when_that_is_reported_and_not_before():
    engine, front, back = filled()
    front.is_async, back.delay = (lambda request_id: True), (lambda number: 5)
    engine.add(make_request(1, PROMPT, max_tokens=4))
    engine.step()
    engine.abort(1)
    assert front.ended[-1] == "r1-1"
    for _ in range(4):
        assert engine.scheduler._kv.usage == pytest.approx(6 / 39)
        engine.step()
    settle(engine)
    assert engine.scheduler._kv.usage == 0.0


def test_what_only_loads_saves_nothing_and_what_only_saves_is_not_asked():
    engine, front, _ = make_engine(transfer={"kv_role": "kv_producer"})
    run(engine, 0, 1)
    assert front.known and not front.lookups
    engine, front, _ = make_engine(transfer={"kv_role": "kv_consumer"})
    run(engine, 0)
    assert front.lookups and not front.known


@pytest.mark.parametrize(
    "call", ["get_num_new_matched_tokens", "update_state_after_alloc", "request_finished", "build_connector_meta"]
)
def test_a_call_beside_the_scheduler_that_raises_costs_what_it_was_about_and_no_request(call, caplog):
    engine, front, _ = filled()
    front.raises = {call}
    front.is_async = lambda request_id: request_id == "r2-2"
    run(engine, 1, 2)
    assert engine.tokens[1] == answer_to(1) and engine.tokens[2] == answer_to(2)
    assert engine.scheduler._kv.usage == 0.0 and "Scripted failed in the scheduler" in caplog.text


def test_loads_whose_beginning_raises_are_computed(caplog):
    engine, front, back = filled()
    back.raises = {"start_load_kv"}
    front.is_async = lambda request_id: request_id == "r2-2"
    engine.add(*(make_request(handle, PROMPT, max_tokens=4) for handle in (1, 2)))
    while len(engine.finished) < 3:
        engine.step()
    assert engine.tokens[1] == answer_to(1) and engine.tokens[2] == answer_to(2)
    assert "failed in start_load_kv" in caplog.text


@settings(max_examples=properties.EXAMPLES, deadline=None)
@given(properties.scheduler_settings(), properties.scripts(), st.sampled_from([1, 2]), st.sampled_from([0, 2]))
def test_whatever_is_late_or_lost_every_request_gets_its_answer_and_every_block_comes_back(
    config, script, depth, knows_late
):
    config = {**config, "groups": (), "more_pools": (), "prefix_caching": True}
    del config["groups"], config["more_pools"]
    config["max_model_len"] = properties.MAX_MODEL_LEN
    engine, front, back = make_engine(depth=depth, **config)
    front.is_async = lambda request_id: zlib.crc32(request_id.encode()) % 2 > 0
    front.knows_late = knows_late
    back.delay = lambda number: zlib.crc32(b"%d" % number) % 4
    back.fails = lambda number: number % 5 == 4
    accepted: dict[int, Any] = {}
    for action in script:
        if isinstance(action, properties.Add):
            try:
                engine.add(action.request)
                accepted[action.request.handle] = action.request
            except ValidationError:
                continue
        elif isinstance(action, properties.Abort):
            engine.abort(action.handle)
        elif isinstance(action, properties.Hold):
            engine.scheduler.hold(action.handles)
        elif isinstance(action, properties.Fail):
            engine.fail_step()
        elif isinstance(action, properties.Reset):
            if isinstance(engine, LateEngine):
                engine.drain()
            engine.scheduler.reset_prefix_cache(action.with_running)
        else:
            engine.step(action.abort_in_flight)
    engine.scheduler.hold(())
    engine.run()
    properties.check_answers(engine, accepted)
    settle(engine)
    assert front.known <= back.kept.keys() and sorted(front.ended) == sorted(f"r{one}-{one}" for one in accepted)
    assert all(end.finish_reason is not FinishReason.ERROR for end in engine.finished.values())
    assert engine.scheduler._kv.usage == 0.0 and engine.scheduler.reset_prefix_cache()
