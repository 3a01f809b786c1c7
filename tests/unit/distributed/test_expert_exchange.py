"""Exchanges of experts' rows between replicas, judged by plain torch. Ranks are threads here."""

from __future__ import annotations

import os
import select
from collections.abc import Iterator

import pytest
import torch

from quire.core.expert_group import ExpertGroup
from quire.distributed.expert_exchange import ExpertExchange
from quire.errors import CommunicationError, ConfigError, ShapeError
from quire.kernels.native.runtime import NativeRuntime
from quire.kernels.native.step_graph import GraphArena, StepGraph
from quire.kernels.shared_rows import ExpertRows
from tests.unit.distributed.test_communicator import on_ranks

CAPACITY = 8192  # so small that larger steps take several rounds
NUM_EXPERTS, NUM_CHOSEN, SIZE = 10, 3, 24
SLOTS = torch.tensor([3, 0, 9, 1, 8, 2, 7, 5, 4, 6], dtype=torch.int32)
FIRSTS = {1: [0, 10], 2: [0, 4, 10], 3: [0, 1, 1, 10], 4: [0, 2, 5, 9, 10]}


@pytest.fixture
def fds() -> Iterator[list[int]]:
    found = [os.memfd_create("experts"), *(os.eventfd(0, os.EFD_NONBLOCK) for _ in range(3))]
    yield found
    for fd in found:
        os.close(fd)


def end_of(
    fds: list[int],
    rank: int,
    num_replicas: int,
    per_replica: int = 1,
    timeout_s: float = 60,
    runtime: NativeRuntime | None = None,
) -> ExpertExchange:
    group = ExpertGroup(rank // per_replica, fds[0], fds[1 : 1 + num_replicas], timeout_s)
    runtime = runtime or NativeRuntime("portable", 1)
    return ExpertExchange(runtime, group, rank % per_replica, per_replica, capacity=CAPACITY)


def tokens_of(replica: int, num_tokens: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Vectors, and different experts for each token."""
    generator = torch.Generator().manual_seed(100 * seed + replica)
    x = torch.randn(num_tokens, SIZE, generator=generator)
    scores = torch.rand(num_tokens, NUM_EXPERTS, generator=generator)
    return x, scores.topk(NUM_CHOSEN).indices.int()


def computed(x: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """What the expert in a slot makes of a vector, half as wide."""
    return x[:, : SIZE // 2] * (slots[:, None] + 1.0)


def passed(end: ExpertExchange, x: torch.Tensor, ids: torch.Tensor, *, has_rows: bool) -> torch.Tensor:
    """A mixture's rows for own choices, [num_tokens * NUM_CHOSEN, size], by token; `has_rows`: a vector for each."""
    firsts = FIRSTS[end.size]
    places = torch.arange(ids.numel(), dtype=torch.int32).flip(0).view(ids.shape)
    given = x.repeat_interleave(NUM_CHOSEN, 0).flip(0).contiguous() if has_rows else x
    shared = end.dispatch(ExpertRows(given, ids, places if has_rows else None), SLOTS, firsts)
    first, stop = firsts[end.rank], firsts[end.rank + 1]
    counts = shared.starts.diff()
    assert len(counts) == stop - first and shared.starts[0] == 0
    rows = torch.full((len(shared.rows), SIZE // 2), torch.nan)
    own = torch.repeat_interleave(torch.arange(first, stop), counts)
    rows[: len(own)] = computed(shared.rows[: len(own)], own)
    return end.collect(rows, shared, places, firsts).flip(0)


def expected(x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return computed(x.repeat_interleave(NUM_CHOSEN, 0), SLOTS[ids.view(-1).long()])


@pytest.mark.parametrize(("num_replicas", "per_replica"), [(2, 1), (3, 1), (2, 2)])
def test_every_replica_gets_the_rows_of_its_own_tokens_whatever_the_others_have(
    fds: list[int], num_replicas: int, per_replica: int
):
    steps = [(1, 0, 2), (0, 0, 0), (5, 130, 1), (0, 1, 90), (200, 170, 3)]

    def body(rank: int) -> None:
        end = end_of(fds, rank, num_replicas, per_replica)
        replica = rank // per_replica
        for number, sizes in enumerate(steps):
            x, ids = tokens_of(replica, sizes[replica], number)
            others = end.begin_pass(len(x))
            assert others == sum(sizes[:num_replicas]) - len(x)
            for has_rows in (False, True):
                assert torch.equal(passed(end, x, ids, has_rows=has_rows), expected(x, ids))
        assert end.num_passes == len(steps)

    on_ranks(num_replicas * per_replica, body)


def test_a_recorded_exchange_is_replayed_whatever_tokens_others_have(fds: list[int]):
    sizes = [(4, 6), (4, 0), (4, 8), (4, 3)]

    def body(rank: int) -> None:
        runtime, arena = NativeRuntime("portable", 1), GraphArena(1 << 20)
        end = end_of(fds, rank, 2, runtime=runtime)
        graph = StepGraph(runtime, arena)
        fixed_x, fixed_ids = tokens_of(0, 4)
        kept: list[object] = []

        def passed_on(x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
            """Experts give what they are given, so that kernels alone are recorded."""
            places = torch.arange(ids.numel(), dtype=torch.int32).view(ids.shape)
            shared = end.dispatch(ExpertRows(x, ids), SLOTS, FIRSTS[2])
            kept.append((places, shared))
            return end.collect(shared.rows, shared, places, FIRSTS[2])

        out = torch.empty(0)
        for number, step in enumerate(sizes):
            x, ids = tokens_of(rank, step[rank], number)
            end.begin_pass(len(x))
            if rank == 1:
                out = passed_on(x, ids)
            elif number == 0:
                end.room = 8
                with graph.recording():
                    out = passed_on(fixed_x.copy_(x), fixed_ids.copy_(ids))
            else:
                fixed_x.copy_(x)
                fixed_ids.copy_(ids)
                graph.replay()
            assert torch.equal(out, x.repeat_interleave(NUM_CHOSEN, 0))

    on_ranks(2, body)


def test_an_idle_replica_is_woken_by_its_bell_and_only_when_it_is_waited_for(fds: list[int]):
    def body(rank: int) -> None:
        end = end_of(fds, rank, 2)
        for _ in range(3):
            if rank == 0:
                end.begin_pass(1)
                continue
            while not end.is_awaited:
                select.select([end.bell], [], [])
            assert end.begin_pass(0) == 1
        assert not end.is_awaited

    on_ranks(2, body)


def test_what_does_not_fit_is_refused_by_name(fds: list[int]):
    end = end_of(fds, 0, 1)
    x, ids = tokens_of(0, 2)
    with pytest.raises(ConfigError, match="max_num_batched_tokens"):
        end.check_room(CAPACITY, 4 * SIZE)
    end.check_room(1000, 4 * SIZE)
    end.begin_pass(2)
    with pytest.raises(ShapeError, match="expert_ids"):
        end.dispatch(ExpertRows(x, ids + NUM_EXPERTS), SLOTS, FIRSTS[1])
    with pytest.raises(ShapeError, match="slots"):
        end.dispatch(ExpertRows(x, ids), SLOTS + 1, FIRSTS[1])
    with pytest.raises(ShapeError, match="x_rows"):
        end.dispatch(ExpertRows(x, ids, ids + 2), SLOTS, FIRSTS[1])
    shared = end.dispatch(ExpertRows(x, ids), SLOTS, FIRSTS[1])
    shared.places[0, 0] = 6
    with pytest.raises(ShapeError, match="global"):
        end.collect(shared.rows, shared, ids, FIRSTS[1])


def test_more_rows_than_there_is_room_for_end_the_step_on_the_rank_that_has_no_room(fds: list[int]):
    def body(rank: int) -> str:
        end = end_of(fds, rank, 2, timeout_s=0.3)
        x, ids = tokens_of(rank, (1, 40)[rank])
        end.begin_pass(len(x))
        end.room = 2
        try:
            passed(end, x, ids, has_rows=False)
        except CommunicationError as error:
            end.abort()
            return error.message
        return ""

    first, second = on_ranks(2, body)
    assert "room" in first and ("room" in second or "has ended" in second or "did not come" in second)
