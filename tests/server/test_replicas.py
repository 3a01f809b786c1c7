"""Several replicas as one engine: their streams when one dies, comes back or not, is added or removed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from quire.engine import supervisor
from quire.engine.data_parallel import replicas
from quire.errors import EngineDeadError, UnsupportedError, ValidationError
from tests.server.hand_core import HandCore, HandEngine
from tests.server.replicas import Fleet, expected

PROMPTS = [[i + 5] * (6 + i) for i in range(10)]
ANSWERS = [expected(prompt, 12) for prompt in PROMPTS]


def run(test: Callable[[Fleet], Awaitable[None]], count: int = 2, **settings: Any) -> None:
    async def main() -> None:
        fleet = Fleet(count, **settings)
        try:
            await test(fleet)
        finally:
            fleet.shutdown()

    asyncio.run(main())


async def begin(fleet: Fleet, **options: Any) -> list[Any]:
    return [await fleet.open(prompt, 12, f"r{i}", **options) for i, prompt in enumerate(PROMPTS)]


def test_requests_are_spread_and_every_answer_is_that_of_one_engine():
    async def test(fleet: Fleet) -> None:
        streams = await begin(fleet)
        steps: dict[int, int] = {}
        fleet.engine.step_listeners.append(
            lambda step: steps.update({step.engine_index: steps.get(step.engine_index, 0) + len(step.handles)})
        )
        assert await fleet.finish(streams) == ANSWERS
        assert set(steps) == {0, 1} and sum(steps.values()) == 120
        assert fleet.engine.last_stats.num_running + fleet.engine.last_stats.num_waiting <= 1
        assert fleet.engine.num_restarts == 0 and fleet.engine.core_pid == 1000

    run(test)


@pytest.mark.parametrize("fronts", [0, 2])
def test_a_replica_that_dies_is_restarted_and_its_streams_go_on_with_the_same_tokens(fronts: int):
    async def test(fleet: Fleet) -> None:
        streams = await begin(fleet)
        await fleet.turn(4)
        fleet.cores[1].die()
        assert await fleet.finish(streams) == ANSWERS
        while not fleet.engine.num_restarts:  # front ends learn of it soon
            await fleet.turn()
        assert fleet.engine.num_restarts == 1 and fleet.engine.num_resumed > 0

    run(test, fronts=fronts)


@pytest.mark.parametrize("turns", [0, 2, 6])
def test_what_a_replica_that_cannot_come_back_had_goes_on_at_another(turns: int):
    async def test(fleet: Fleet) -> None:
        streams = await begin(fleet)
        stream = await fleet.open(PROMPTS[0], 12, "pinned", data_parallel_rank=1)
        await fleet.turn(turns)
        fleet.born_dead = {1}
        fleet.cores[1].die()
        assert await fleet.finish([*streams, stream]) == [*ANSWERS, ANSWERS[0]]
        assert fleet.engine.num_resumed > 0

    run(test, max_restarts=0)


def test_requests_do_not_wait_for_a_replica_that_takes_long_to_come_back(monkeypatch):
    monkeypatch.setattr(supervisor, "UNAVAILABLE_S", 0.01)

    async def test(fleet: Fleet) -> None:
        streams = await begin(fleet)
        await fleet.turn(4)
        fleet.born_slow = {1}
        fleet.cores[1].die()
        assert await fleet.finish(streams) == ANSWERS
        assert fleet.engine.num_ready_replicas == 1 and fleet.engine.num_resumed > 0
        fleet.cores[1].may_be_ready.set()  # type: ignore[attr-defined]
        for _ in range(2000):
            await fleet.turn()
            if fleet.engine.num_ready_replicas == 2:
                return
        raise AssertionError("the replica did not come back")

    run(test)


def test_new_requests_do_not_wait_for_a_replica_that_restarts():
    async def test(fleet: Fleet) -> None:
        fleet.engine._supervisor.attach()
        fleet.born_dead = {1}
        fleet.cores[1].die()
        await asyncio.sleep(0.01)
        streams = await begin(fleet)
        assert fleet.cores[0].has_mail(1.0)
        assert await fleet.finish(streams) == ANSWERS

    run(test)


@pytest.mark.parametrize(("healthy_s", "num_deaths"), [(0.0, 4), (60.0, 1)])
def test_a_core_that_ran_for_long_is_replaced_however_often_though_no_request_came(monkeypatch, healthy_s, num_deaths):
    monkeypatch.setattr(supervisor, "HEALTHY_S", healthy_s)

    async def test(fleet: Fleet) -> None:
        fleet.engine._supervisor.attach()
        for number in range(num_deaths):
            fleet.cores[1].die()
            while fleet.engine.num_restarts == number:
                await asyncio.sleep(0.001)
        assert fleet.engine.num_ready_replicas == 2
        if healthy_s:
            fleet.cores[1].die()
            while 1 in fleet.engine._supervisor.indexes:
                await asyncio.sleep(0.001)

    run(test, max_restarts=1)


def test_a_replica_that_could_not_start_many_times_is_tried_again_soon(monkeypatch):
    monkeypatch.setattr(supervisor, "RETRY_S", 1e-4)
    monkeypatch.setattr(supervisor, "MAX_RETRY_S", 1e-3)

    async def test(fleet: Fleet) -> None:
        fleet.engine._supervisor.attach()
        fleet.born_dead = {1}
        fleet.cores[1].die()
        while fleet.engine._supervisor._replicas[1].supervisor._num_failed_restarts < 24:
            await asyncio.sleep(0.001)
        fleet.born_dead = set()
        while fleet.engine.num_ready_replicas < 2:
            await asyncio.sleep(0.001)

    run(test, max_restarts=1000)


def test_the_last_replica_takes_the_engine_with_it():
    async def test(fleet: Fleet) -> None:
        streams = await begin(fleet)
        fleet.born_dead = {0, 1}
        for core in list(fleet.cores.values()):
            core.die()
        with pytest.raises(EngineDeadError, match="stopped 1 times in a row"):
            await fleet.finish(streams)
        assert fleet.engine.errored

    run(test, max_restarts=0)


@pytest.mark.parametrize("fronts", [0, 2])
def test_replicas_are_added_and_removed_under_load_and_nothing_is_lost(monkeypatch, fronts: int):
    monkeypatch.setattr(replicas, "DRAIN_POLL_S", 0.001)

    async def test(fleet: Fleet) -> None:
        streams = await begin(fleet)
        await fleet.engine.scale(3)
        assert fleet.engine.data_parallel_size == 3
        more = [await fleet.open(prompt, 12, f"more{i}") for i, prompt in enumerate(PROMPTS)]
        while not fleet.cores[2].has_mail():  # a new replica gets requests at once
            await asyncio.sleep(0.001)
        await fleet.turn(3)
        removing = asyncio.ensure_future(fleet.engine.scale(1, 0.0))  # nobody may finish
        late = [await fleet.open(prompt, 12, f"late{i}") for i, prompt in enumerate(PROMPTS)]
        assert await fleet.finish([*streams, *more, *late]) == ANSWERS * 3
        await removing
        assert fleet.engine.data_parallel_size == 1 and fleet.engine.num_resumed > 0
        removed = await begin(fleet)
        assert await fleet.finish(removed) == ANSWERS

    run(test, fronts=fronts)


@pytest.mark.parametrize("fronts", [0, 2])
def test_replicas_are_restarted_one_by_one_under_load(monkeypatch, fronts: int):
    monkeypatch.setattr(replicas, "DRAIN_POLL_S", 0.001)

    async def test(fleet: Fleet) -> None:
        before = dict(fleet.cores)
        streams = await begin(fleet)
        await fleet.turn(3)
        restarting = asyncio.ensure_future(fleet.engine.restart_replicas(0.0))
        late = [await fleet.open(prompt, 12, f"late{i}") for i, prompt in enumerate(PROMPTS)]
        assert await fleet.finish([*streams, *late]) == ANSWERS * 2
        await restarting
        assert fleet.engine.data_parallel_size == fleet.engine.num_ready_replicas == 2
        assert all(before[index].is_dead and core is not before[index] for index, core in fleet.cores.items())
        await fleet.engine.scale(1)
        with pytest.raises(ValidationError, match="cannot be restarted without a pause"):
            await fleet.engine.restart_replicas()

    run(test, fronts=fronts)


def test_a_removed_replica_finishes_what_it_runs_when_there_is_time(monkeypatch):
    monkeypatch.setattr(replicas, "DRAIN_POLL_S", 0.001)

    async def test(fleet: Fleet) -> None:
        streams = await begin(fleet)
        removing = asyncio.ensure_future(fleet.engine.scale(1, 60.0))
        assert await fleet.finish(streams) == ANSWERS
        await removing
        assert fleet.engine.num_resumed == 0

    run(test)


def test_a_request_may_name_its_replica_and_answers_to_one_prompt_stay_together():
    async def test(fleet: Fleet) -> None:
        placement = fleet.engine._supervisor._placement
        for rank in (0, 1, 1, 1):
            await fleet.open([5], 3, f"r{placement._turn}", data_parallel_rank=rank)
        assert (placement.num_requests(0), placement.num_requests(1)) == (1, 3)
        with pytest.raises(ValidationError, match="data_parallel_rank=2 is not a replica"):
            await fleet.open([5], 3, "none", data_parallel_rank=2)
        from quire.core.sampling_params import SamplingParams

        stream = await fleet.engine.open_stream({"prompt_token_ids": [5] * 9}, SamplingParams(n=4, max_tokens=3), "n")
        assert sorted([placement.num_requests(0), placement.num_requests(1)]) in ([3, 5], [1, 7])
        stream.close()
        await fleet.turn(3)

    run(test)


def test_tenants_counters_reach_the_cores_and_pauses_and_resets_all_of_them():
    async def test(fleet: Fleet) -> None:
        from quire.core.tenancy import TenantShare

        shares = [TenantShare(name=name) for name in ("a", "b")]
        streams = [await fleet.open(prompt, 12, f"r{i}", tenant=shares[i % 2]) for i, prompt in enumerate(PROMPTS)]
        assert await fleet.finish(streams) == ANSWERS
        waiting = [asyncio.ensure_future(fleet.engine.pause_generation()), asyncio.ensure_future(reset(fleet))]
        while not all(one.done() for one in waiting):
            await fleet.turn()
        assert waiting[1].result() is True

    async def reset(fleet: Fleet) -> bool:
        return await fleet.engine.reset_prefix_cache()

    run(test, scheduling_policy="fair")


def test_an_engine_of_one_replica_has_rank_0_alone_and_stays_one():
    async def main() -> None:
        engine = HandEngine(HandCore(4))
        fleet = Fleet.__new__(Fleet)
        fleet.engine = engine
        with pytest.raises(ValidationError, match="one replica, of rank 0"):
            await fleet.open([5], 3, "r", data_parallel_rank=1)
        with pytest.raises(UnsupportedError, match="started with one replica"):
            await engine.scale(2)
        engine.shutdown()

    asyncio.run(main())
