"""Collectives: every kind of communicator, judged by plain torch. Ranks are threads here, each with its own end."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TypeVar

import pytest
import torch

from quire.distributed.communicator import Communicator, SingleCommunicator
from quire.distributed.host_links import HostListener, HostPlan, connect_hosts, new_key
from quire.distributed.shared_memory import SharedMemoryCommunicator, make_region
from quire.errors import CommunicationError, ShapeError
from quire.kernels.native.runtime import NativeRuntime
from quire.kernels.native.step_graph import GraphArena, StepGraph

T = TypeVar("T")
CAPACITY = 4096  # so small that most operations take several rounds
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@contextmanager
def region(size: int, capacity: int = CAPACITY) -> Iterator[int]:
    fd = make_region(size, capacity)
    try:
        yield fd
    finally:
        os.close(fd)


def on_ranks(size: int, body: Callable[[int], T]) -> list[T]:
    """What `body(rank)` returns on each rank, all at once; raises what one raises."""
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = body(rank)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [results[rank] for rank in range(size)]


def shared(fd: int, rank: int, size: int, threads: int = 1, **options: float) -> SharedMemoryCommunicator:
    runtime = NativeRuntime("portable", threads)
    return SharedMemoryCommunicator(runtime, fd, rank, size, capacity=CAPACITY, **options)  # type: ignore[arg-type]


@contextmanager
def machines(hosts: list[int], **options: float) -> Iterator[Callable[[int], SharedMemoryCommunicator]]:
    """What makes a rank's end of a group on several machines, which share nothing but connections."""
    with ExitStack() as stack:
        fds = [stack.enter_context(region(len(hosts))) for _ in set(hosts)]
        listeners = [HostListener() for _ in fds]
        plan = HostPlan(hosts, [(one.address, one.port) for one in listeners], new_key())

        def make(rank: int) -> SharedMemoryCommunicator:
            host = hosts[rank]
            sockets = connect_hosts(plan, rank, listeners[host] if plan.is_first(rank) else None, 30)
            return shared(fds[host], rank, len(hosts), plan=plan, sockets=sockets, **options)  # type: ignore[arg-type]

        yield make


GROUPS = [("shared", 2), ("shared", 3), ("shared", 8), ("machines", 2), ("machines", 3), ("machines", 5)]


@pytest.fixture(params=GROUPS, ids=lambda group: f"{group[0]} {group[1]}")
def group(request: pytest.FixtureRequest) -> Iterator[tuple[int, Callable[[int], Communicator]]]:
    """The size of a group, and what makes a rank's end of it."""
    kind, size = request.param
    if kind == "machines":  # the first has two ranks of three, of five the first and the last are of one
        with machines([0, 0, 1] if size == 3 else [0, 1, 1, 2, 0] if size == 5 else [0, 1]) as make:
            yield size, make
        return
    with region(size) as fd:
        yield size, lambda rank: shared(fd, rank, size)


def pairwise(parts: list[torch.Tensor]) -> torch.Tensor:
    """The sum as a tree over neighbours."""
    sums = [part.float() for part in parts]
    while len(sums) > 1:
        sums = [sums[i] + sums[i + 1] if i + 1 < len(sums) else sums[i] for i in range(0, len(sums), 2)]
    return sums[0]


def values(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(rank)).mul_(10.0**rank).to(dtype)


def test_every_collective_gives_what_it_says_on_every_rank(group: tuple[int, Callable[[int], Communicator]]):
    size, make = group
    widths = [16 * (rank + 1) for rank in range(size)]
    sums = {name: pairwise([values(rank, 700, dtype=dtype) for rank in range(size)]) for name, dtype in DTYPES.items()}
    columns = torch.cat([values(rank, 9, widths[rank]) for rank in range(size)], 1)
    ids = torch.tensor([0, 5 * size - 1, 3, 3, 7, *range(5 * size)])
    table = values(99, 5 * size, 40)
    boxes = [values(rank, size, 300) for rank in range(size)]
    # Rank i has i groups and one more; some have no rows, and of rank 1 none has.
    firsts = [rank * (rank + 1) // 2 for rank in range(size + 1)]
    counts = [0 if group in (1, 2, 4) else 3 * group + 1 for group in range(firsts[-1])]
    starts = torch.tensor([0, *counts]).cumsum(0).int()
    grouped = values(7, int(starts[-1]), 40)
    scattered = pairwise([values(rank, size, 500) for rank in range(size)])

    def body(rank: int) -> None:
        one = make(rank)
        assert (one.rank, one.size) == (rank, size)
        for name, dtype in DTYPES.items():
            reduced = values(rank, 700, dtype=dtype)
            one.all_reduce(reduced)
            assert torch.equal(reduced, sums[name].to(dtype))
        assert torch.equal(one.all_gather(values(rank, 9, widths[rank]), widths), columns)
        padded = torch.zeros(9, sum(widths) + 5)
        gathered = one.all_gather(values(rank, 9, widths[rank]), widths, padded[:, :-5], root=size - 1)
        if rank == size - 1:
            assert torch.equal(gathered, columns) and not padded[:, -5:].any()
        local = one.local_ids(ids, 5 * rank, 5)
        assert torch.equal(one.gather_rows(ids, 5 * rank, 5, table[5 * rank : 5 * rank + 5][local]), table[ids])
        rows = torch.full_like(grouped, torch.nan)
        own = slice(int(starts[firsts[rank]]), int(starts[firsts[rank + 1]]))
        rows[own] = grouped[own]
        one.gather_groups(rows, starts, firsts)
        assert torch.equal(rows, grouped)
        assert torch.equal(one.reduce_scatter(values(rank, size, 500)), scattered[rank])
        assert torch.equal(one.all_to_all(boxes[rank]), torch.stack([box[rank] for box in boxes]))
        news = values(rank, 2000)
        one.broadcast(news, 1)
        assert torch.equal(news, values(1, 2000))
        one.barrier()
        assert one.all_agree(True) and not one.all_agree(rank != 1)
        token = torch.full((3,), rank)
        if rank == 0:  # once around
            one.send(token, 1)
            one.receive(token, size - 1)
            assert token.tolist() == [size - 1] * 3
        else:
            one.receive(token, rank - 1)
            assert token.tolist() == [rank - 1] * 3
            one.send(token + 1, (rank + 1) % size)
        one.barrier()

    on_ranks(size, body)


def test_sums_have_the_same_bits_on_every_rank_whatever_comes_first():
    """Of values of very different sizes the order of the sum shows."""
    with region(4) as fd:

        def body(rank: int) -> torch.Tensor:
            one, total = shared(fd, rank, 4), values(rank, 300)
            time.sleep(0.001 * ((rank * 3) % 4))
            one.all_reduce(total)
            return total

        first, *others = on_ranks(4, body)
    assert all(torch.equal(first, other) for other in others)
    assert torch.equal(first, (values(0, 300) + values(1, 300)) + (values(2, 300) + values(3, 300)))


def test_a_thousand_operations_of_many_sizes_by_several_threads_do_not_mix():
    with region(2, 1 << 20) as fd:

        def body(rank: int) -> None:
            runtime = NativeRuntime("portable", 2)
            one = SharedMemoryCommunicator(runtime, fd, rank, 2, capacity=1 << 20)
            for i in range(1000):
                own = torch.full((1 + i % 7, 8 * (1 + i % 5)), float(2 * i + rank))
                both = one.all_gather(own, (own.shape[1],) * 2)
                assert both[:, : own.shape[1]].eq(2 * i).all() and both[:, own.shape[1] :].eq(2 * i + 1).all()
            large = torch.full((300, 500), float(rank))
            both = one.all_gather(large, (500, 500))
            assert both[:, :500].eq(0).all() and both[:, 500:].eq(1).all()

        on_ranks(2, body)


def test_messages_in_pieces_arrive_while_others_compute():
    size = 3
    with region(size) as fd:
        data = torch.arange(700_000)

        def body(rank: int) -> torch.Tensor:
            one = shared(fd, rank, size)
            if rank == 0:
                one.send(data, 2)
                return data
            if rank == 1:
                return data
            received = torch.zeros_like(data)
            one.receive(received, 0)
            return received

        assert all(torch.equal(received, data) for received in on_ranks(size, body))


def test_a_recorded_step_repeats_its_collectives():
    with region(2) as fd:

        def body(rank: int) -> None:
            runtime = NativeRuntime("portable")
            one = SharedMemoryCommunicator(runtime, fd, rank, 2, capacity=CAPACITY)
            graph, own = StepGraph(runtime, GraphArena(1 << 16)), torch.empty(2, 4)
            own.fill_(rank)
            with graph.recording():
                both = one.all_gather(own, (4, 4))
                one.all_reduce(own)
            assert graph.num_calls == 2 and own.eq(1).all()
            for i in range(1, 4):
                own.fill_(10 * i + rank)
                one.barrier()  # between replays other operations may run
                graph.replay()
                assert both.tolist() == [[10.0 * i] * 4 + [10.0 * i + 1] * 4] * 2 and own.eq(20 * i + 1).all()

        on_ranks(2, body)


def test_a_missing_rank_is_named():
    begin = threading.Barrier(2)
    with region(3) as fd:

        def body(rank: int) -> str:
            one = shared(fd, rank, 3, timeout_s=0.4, spin_us=10)
            if rank == 1:
                return ""
            begin.wait()
            with pytest.raises(CommunicationError) as caught:
                one.all_gather(torch.zeros(1, 1), (1, 1, 1))
            return caught.value.message

        first, _, last = on_ranks(3, body)
    assert first == last == "rank 1 did not come to all_gather (operation 1) within 400 ms"


def test_the_end_of_a_rank_ends_all_waits_at_once_also_recorded_ones():
    with region(2) as fd:
        runtime = NativeRuntime("portable")
        one = SharedMemoryCommunicator(runtime, fd, 0, 2, capacity=CAPACITY, spin_us=10, timeout_s=60)
        other = shared(fd, 1, 2)
        graph, total = StepGraph(runtime, GraphArena(1 << 16)), torch.ones(2)
        peer = threading.Thread(target=lambda: other.all_reduce(torch.ones(2)))
        peer.start()
        with graph.recording():
            one.all_reduce(total)
        peer.join()
        watcher = threading.Timer(0.05, lambda: other.abort(1))
        watcher.start()
        for call in (graph.replay, one.barrier, lambda: one.receive(total, 1, is_patient=True)):
            with pytest.raises(CommunicationError, match="rank 1 has ended"):
                call()
        watcher.join()


def test_a_killed_process_leaves_no_memory_behind(tmp_path):
    """The region has no name: nothing is in /dev/shm, and the pages go with the last process."""
    before = set(os.listdir("/dev/shm"))
    with region(2) as fd:
        code = (
            "import sys\nfrom quire.distributed.shared_memory import SharedMemoryCommunicator\n"
            "from quire.kernels.native.runtime import NativeRuntime\n"
            "one = SharedMemoryCommunicator(NativeRuntime('portable'), int(sys.argv[1]), 1, 2, capacity=4096)\n"
            "one.barrier()\nprint('here', flush=True)\none.barrier()\n"
        )
        child = subprocess.Popen([sys.executable, "-c", code, str(fd)], pass_fds=(fd,), stdout=subprocess.PIPE)
        one = shared(fd, 0, 2)
        one.barrier()
        assert child.stdout is not None and child.stdout.readline() == b"here\n"
        child.kill()
        child.wait()
        child.stdout.close()
    assert set(os.listdir("/dev/shm")) == before


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda one: one.all_gather(torch.zeros(1, 3), (2, 2)), "own has shape"),
        (lambda one: one.all_gather(torch.zeros(1, 2), (2,)), "number of widths"),
        (lambda one: one.all_gather(torch.zeros(1, 600), (600, 600)), "does not fit"),
        (lambda one: one.all_gather(torch.zeros(1, 2), (2, 2), torch.zeros(1, 5)), "out has shape"),
        (lambda one: one.all_reduce(torch.zeros(3, dtype=torch.int32)), "torch.int32"),
        (lambda one: one.reduce_scatter(torch.zeros(3, 3)), "shape"),
        (lambda one: one.broadcast(torch.zeros(3), 2), "no such rank"),
        (lambda one: one.send(torch.zeros(3), -1), "no such rank"),
        (lambda one: one.gather_rows(torch.zeros(2, dtype=torch.int32), 0, 1, torch.zeros(2, 2)), "ids"),
        (lambda one: shared(0, 2, 2), "rank"),
        (lambda one: shared(0, 0, 65), "size"),
    ],
)
def test_a_wrong_call_is_refused_before_anything_is_sent(call: Callable[[Communicator], object], words: str):
    with region(2) as fd:
        one = shared(fd, 0, 2, timeout_s=1)
        with pytest.raises(ShapeError, match=words):
            call(one)


def test_a_region_that_cannot_be_mapped_is_refused():
    with pytest.raises(CommunicationError, match="mapped"):
        shared(os.open("/dev/null", os.O_RDONLY), 0, 2)


def test_a_group_of_one_gives_back_what_it_is_given():
    one, own, ids = SingleCommunicator(), torch.randn(2, 3), torch.tensor([1, 0])
    out = torch.empty(2, 3)
    assert one.all_gather(own, (3,)) is own and torch.equal(one.all_gather(own, (3,), out), own)
    assert one.all_gather(out, (3,), out) is out
    assert one.gather_rows(ids, 0, 3, own) is own and one.local_ids(ids, 0, 3) is ids
    for nothing in (one.all_reduce, one.broadcast):
        nothing(own)
    assert torch.equal(one.reduce_scatter(own[:1]), own[0]) and one.all_to_all(own[:1]) is not None
    assert one.all_agree(True) and not one.all_agree(False)
    with pytest.raises(ShapeError):
        one.all_gather(own, (2,))
    for talk in (one.send, one.receive):
        with pytest.raises(ShapeError):
            talk(own, 0)
