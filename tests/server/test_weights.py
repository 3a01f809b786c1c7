"""Weights that come and go while an engine serves: rolling updates and sleep, with cores turned by the test."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from quire.engine import supervisor
from quire.errors import EngineDeadError, EngineSleepingError, QuireError, UnsupportedError, ValidationError
from tests.server.replicas import Fleet, expected
from tests.server.test_replicas import ANSWERS, PROMPTS, begin, run

OTHERS = [expected(prompt, 12, weights=1) for prompt in PROMPTS]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "FINISH_POLL_S", 0.001)


async def answered(fleet: Fleet, call: Any) -> Any:
    """The result of what the cores have to answer."""
    task = asyncio.ensure_future(call)
    while not task.done():
        await fleet.turn()
    return await task


async def more(fleet: Fleet, name: str) -> list[Any]:
    return [await fleet.open(prompt, 12, f"{name}{i}") for i, prompt in enumerate(PROMPTS)]


async def settled(fleet: Fleet, front: Any) -> None:
    """Wait until another front end knows what the owner has done."""
    while front.sleep_state != fleet.engine.sleep_state or front.weight_versions != fleet.engine.weight_versions:
        await fleet.turn()


SETUPS = [(1, 0), (2, 0), (1, 2), (2, 2)]
"""Replicas, and front ends if there are several."""


@pytest.mark.parametrize(("count", "fronts"), SETUPS)
def test_weights_are_replaced_under_load_and_every_answer_is_of_one_version(count: int, fronts: int):
    async def test(fleet: Fleet) -> None:
        streams = await begin(fleet)
        await fleet.turn(3)
        updating = asyncio.ensure_future(fleet.engine.update_weights("1", "v1"))
        await fleet.turn()
        late = await more(fleet, "late")
        answers = await fleet.finish([*streams, *late])
        await updating
        assert answers[:10] == ANSWERS, "what had begun was ended with the old weights"
        for answer, old, new, stream in zip(answers[10:], ANSWERS, OTHERS, late, strict=True):
            assert answer == (new if stream.placed.weight_version == "v1" else old)
        assert count > 1 or answers[10:] == OTHERS, "what came later waited for the new ones, or went to others"
        assert fleet.engine.weight_versions == dict.fromkeys(range(count), "v1")
        assert all(core.executor.weights == 1 for core in fleet.cores.values())
        assert await fleet.finish(await begin(fleet)) == OTHERS
        fleet.cores[0].die()
        assert await fleet.finish(await more(fleet, "after")) == OTHERS, "a core that is replaced has the new weights"

    run(test, count, fronts=fronts)


@pytest.mark.parametrize("count", [1, 2])
def test_an_update_that_cannot_be_made_changes_nothing_and_loses_nothing(count: int):
    async def test(fleet: Fleet) -> None:
        streams = await begin(fleet)
        await fleet.turn(3)
        with pytest.raises(ValidationError, match="run on with the old weights"):
            await fleet.engine.update_weights("1", drain_timeout_s=0.0)
        assert await fleet.finish(streams) == ANSWERS
        with pytest.raises(EngineDeadError, match="cannot be loaded"):
            await fleet.engine.update_weights("bad")
        assert await fleet.finish(await more(fleet, "after")) == ANSWERS
        assert set(fleet.engine.weight_versions.values()) == {""}
        with pytest.raises(ValidationError, match="weight_version"):
            await fleet.engine.update_weights("1", "a\nb")

    run(test, count)


def test_a_core_that_dies_during_an_update_comes_back_with_the_weights_of_its_requests():
    async def test(fleet: Fleet) -> None:
        streams = await begin(fleet)
        await fleet.turn(3)
        updating = asyncio.ensure_future(fleet.engine.update_weights("1", "v1"))
        await asyncio.sleep(0)
        fleet.cores[0].die()
        assert await fleet.finish(streams) == ANSWERS
        await updating
        assert await fleet.finish(await more(fleet, "after")) == OTHERS

    run(test)


def test_what_waited_until_the_engine_slept_is_refused_and_does_not_keep_it_from_waking_up():
    async def test(fleet: Fleet) -> None:
        streams = await begin(fleet)
        await fleet.turn(3)
        engine = fleet.engine
        first = asyncio.ensure_future(engine.update_weights("1", "v1"))
        await fleet.turn()
        sleeping = asyncio.ensure_future(engine.sleep(1, "keep"))
        await asyncio.sleep(0)
        calls = (engine.update_weights("1", "v2"), engine.pause_generation("keep"), engine.resume_generation())
        late = [asyncio.ensure_future(call) for call in calls]
        assert await fleet.finish(streams) == ANSWERS
        await first
        await sleeping
        waiting = await more(fleet, "asleep")
        for refused in late:
            with pytest.raises(EngineSleepingError, match="asleep"):
                await asyncio.wait_for(refused, 5)
        assert await engine.wake_up() and await fleet.finish(waiting) == OTHERS

    run(test, enable_sleep_mode=True)


@pytest.mark.parametrize(("count", "fronts"), SETUPS)
def test_an_engine_sleeps_and_its_requests_wait(count: int, fronts: int):
    async def test(fleet: Fleet) -> None:
        streams = await begin(fleet)
        await fleet.turn(4)
        await fleet.engine.sleep(1, "keep")
        for front in fleet.fronts:
            await settled(fleet, front)
            assert await front.is_sleeping() and not front._supervisor.is_restarting
        assert await fleet.engine.is_sleeping() and fleet.engine.sleep_state.name == "weights_offloaded"
        assert all(core.is_dead for core in fleet.cores.values())
        await fleet.engine.check_health()
        assert await fleet.engine.live_states() == [] and await fleet.engine.reset_prefix_cache()
        waiting = await more(fleet, "asleep")
        assert sum(one.num_held for one in fleet.fronts or [fleet.engine]) == len(streams) + len(waiting)
        for refused in (fleet.engine.update_weights("1"), fleet.engine.restart_replicas()):
            with pytest.raises(EngineSleepingError, match="asleep"):
                await refused
        assert not await fleet.engine.wake_up(["weights"]) and fleet.cores[0].is_dead
        assert await fleet.engine.wake_up(["kv_cache"]) and fleet.engine.sleep_state.name == "awake"
        assert await fleet.finish([*streams, *waiting]) == ANSWERS * 2
        assert fleet.engine.num_held == 0
        assert await fleet.engine.wake_up(), "harmless when awake"

    run(test, count, fronts=fronts, enable_sleep_mode=True)


@pytest.mark.parametrize("fronts", [0, 2])
def test_modes_of_sleep_end_or_finish_what_runs(fronts: int):
    async def test(fleet: Fleet) -> None:
        streams = await begin(fleet)
        await fleet.turn(2)
        sleeping = asyncio.ensure_future(fleet.engine.sleep(2, "wait"))
        assert await fleet.finish(streams) == ANSWERS
        await sleeping
        assert fleet.engine.sleep_state.name == "discard_all"
        await fleet.engine.wake_up()
        streams = await begin(fleet)
        await fleet.turn(4)
        await fleet.engine.sleep()
        outputs = [await stream.get() for stream in streams]
        assert all(output.finished and output.outputs[0].finish_reason == "abort" for output in outputs)
        await fleet.engine.wake_up()
        await answered(fleet, fleet.engine.sleep(0, "keep"))
        assert fleet.engine.is_paused and not fleet.cores[0].is_dead and await fleet.engine.is_sleeping()
        await answered(fleet, fleet.engine.wake_up(["scheduling"]))
        assert not fleet.engine.is_paused
        for wrong in ((7, "keep"), (1, "hard")):
            with pytest.raises(ValidationError, match="is unknown"):
                await fleet.engine.sleep(*wrong)
        with pytest.raises(ValidationError, match="unknown tag"):
            await fleet.engine.wake_up(["disk"])

    run(test, 1, fronts=fronts, enable_sleep_mode=True)


@pytest.mark.parametrize("fronts", [0, 2])
@pytest.mark.parametrize("what", ["wake", "reject"])
def test_a_request_wakes_the_engine_or_is_refused_as_the_setting_says(what: str, fronts: int):
    async def test(fleet: Fleet) -> None:
        await fleet.engine.sleep()
        if what == "reject":
            with pytest.raises(QuireError, match="asleep"):
                for stream in await begin(fleet):
                    await stream.get()
            await fleet.engine.wake_up()
        assert await fleet.finish(await more(fleet, "late")) == ANSWERS
        assert not await fleet.engine.is_sleeping()

    run(test, 1, fronts=fronts, enable_sleep_mode=True, sleeping_requests=what)


@pytest.mark.parametrize("fronts", [0, 2])
def test_a_paused_engine_keeps_ends_or_finishes_what_runs(fronts: int):
    async def test(fleet: Fleet) -> None:
        streams = await begin(fleet)
        await fleet.turn(3)
        await answered(fleet, fleet.engine.pause_generation("keep", clear_cache=True))
        late = await more(fleet, "late")
        await fleet.turn()
        for stream in streams:
            stream.take()
        await fleet.turn(5)
        assert fleet.engine.is_paused and not any(stream.is_ready for stream in [*streams, *late])
        with pytest.raises(ValidationError, match="while the engine is paused"):
            await fleet.engine.pause_generation("wait")
        await answered(fleet, fleet.engine.resume_generation())
        assert await fleet.finish([*streams, *late]) == ANSWERS * 2 and not fleet.engine.is_paused
        streams = await begin(fleet)
        await fleet.turn(3)
        pausing = asyncio.ensure_future(fleet.engine.pause_generation("wait"))
        assert await fleet.finish(streams) == ANSWERS
        await answered(fleet, pausing)
        await answered(fleet, fleet.engine.resume_generation())
        streams = await begin(fleet)
        await fleet.turn(3)
        await answered(fleet, fleet.engine.pause_generation("abort", clear_cache=True))
        ended = [await stream.get() for stream in streams]
        assert all(one.finished and one.outputs[0].finish_reason == "abort" for one in ended)
        with pytest.raises(ValidationError, match="is unknown"):
            await fleet.engine.pause_generation("freeze")

    run(test, 1, fronts=fronts)


@pytest.mark.parametrize("fronts", [0, 2])
def test_requests_of_a_paused_engine_go_on_with_the_weights_that_it_is_given_meanwhile(fronts: int):
    async def test(fleet: Fleet) -> None:
        streams = [await fleet.open(prompt, 12, f"r{i}") for i, prompt in enumerate(PROMPTS[:2])]
        while not all(stream.is_ready for stream in streams):
            await fleet.turn()
        await answered(fleet, fleet.engine.pause_generation("keep"))
        await answered(fleet, fleet.engine.update_weights("1", "v1"))
        assert fleet.engine.is_paused
        await answered(fleet, fleet.engine.resume_generation())
        answers = await fleet.finish(streams)
        for answer, old, new in zip(answers, ANSWERS, OTHERS, strict=False):
            assert answer[0] == old[0] and answer != old and answer != new, (
                "begun with the old, ended with the new ones"
            )

    run(test, 1, fronts=fronts)


def test_sleep_mode_has_to_be_enabled():
    async def test(fleet: Fleet) -> None:
        with pytest.raises(UnsupportedError, match="sleep mode is off"):
            await fleet.engine.sleep()

    run(test, 1)
