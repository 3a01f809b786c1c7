"""Groups on several machines when something between them fails. Ranks are threads, the network is the test's."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from quire.distributed import host_links
from quire.distributed.host_links import HostListener, HostPlan, connect_hosts, new_key, number_hosts
from quire.distributed.shared_memory import SharedMemoryCommunicator, make_region
from quire.errors import CommunicationError
from quire.kernels.native.runtime import NativeRuntime


class Network:
    """Carries what goes from one rank to the other; can be interrupted, and can damage a byte."""

    def __init__(self, port: int) -> None:
        self._target = ("127.0.0.1", port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.is_up = threading.Event()
        self.is_up.set()
        self.is_damaging = False
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        # A rank that has ended may reset its connections.
        with (
            contextlib.suppress(ConnectionError), self._listener, self._listener.accept()[0] as one,
            socket.create_connection(self._target) as other,
        ):  # fmt: skip
            self._carry(one, other)

    def _carry(self, one: socket.socket, other: socket.socket) -> None:
        while True:
            for source in select.select([one, other], [], [])[0]:
                self.is_up.wait()
                data = bytearray(source.recv(1 << 16))
                if self.is_damaging and data:
                    data[-1] ^= 4
                if not data:
                    return
                (other if source is one else one).sendall(data)


class Pair:
    """Two ranks on two machines, and the network between them."""

    def __init__(self, *timeouts_s: float) -> None:
        self.listeners = [HostListener(), HostListener()]
        self.networks = [Network(one.port) for one in self.listeners]
        plan = HostPlan([0, 1], [("127.0.0.1", one.port) for one in self.networks], new_key())
        sockets = both(lambda rank: connect_hosts(plan, rank, self.listeners[rank], 30))
        self.ranks = [
            SharedMemoryCommunicator(
                NativeRuntime("portable"), make_region(2, 1 << 16), rank, 2, capacity=1 << 16, spin_us=10,
                timeout_s=timeouts_s[rank], plan=plan, sockets=sockets[rank],
            )
            for rank in range(2)
        ]  # fmt: skip

    def sum(self, value: float) -> list[torch.Tensor]:
        totals = [torch.full((2000,), float(value + rank)) for rank in range(2)]
        both(lambda rank: self.ranks[rank].all_reduce(totals[rank]))
        return totals

    def set_up(self, is_up: bool) -> None:
        for network in self.networks:
            network.is_up.set() if is_up else network.is_up.clear()


def both(body: Callable[[int], object]) -> list:
    """Results of both ranks; what they raise instead."""
    results: list = [None, None]

    def run(rank: int) -> None:
        try:
            results[rank] = body(rank)
        except CommunicationError as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.fixture
def pair() -> Iterator[Pair]:
    yield Pair(60, 60)


def test_a_network_that_comes_back_costs_a_wait_and_nothing_else(pair: Pair):
    assert pair.ranks[0].silence == (1, pytest.approx(0, abs=30))
    pair.set_up(False)
    totals = list[list[torch.Tensor]]()
    waiting = threading.Thread(target=lambda: totals.append(pair.sum(3)))
    waiting.start()
    while pair.ranks[0].silence[1] < 0.5:  # type: ignore[index]
        time.sleep(0.01)
    assert waiting.is_alive()
    pair.set_up(True)
    waiting.join()
    assert all(total.eq(7).all() for total in totals[0])
    assert all(total.eq(9).all() for total in pair.sum(4))


def test_a_machine_from_which_nothing_comes_is_named_also_when_nothing_runs_and_learns_it_when_it_is_back():
    pair = Pair(0.6, 60)
    pair.set_up(False)
    token = torch.zeros(1)
    with pytest.raises(CommunicationError) as caught:
        pair.ranks[0].receive(token, 1, is_patient=True)
    assert caught.value.message == "nothing came from rank 1, on another machine, for 600 ms"
    pair.set_up(True)
    with pytest.raises(CommunicationError, match="rank 1 has ended"):
        pair.ranks[1].receive(token, 0, is_patient=True)


def test_a_damaged_byte_ends_the_group_before_anything_is_read(pair: Pair):
    pair.networks[1].is_damaging = True
    total = torch.ones(2000)
    _, second = both(lambda rank: pair.ranks[rank].all_reduce(total.clone()))
    assert second.message == "what came from rank 0, on another machine, was damaged"


def test_the_end_of_a_rank_is_named_on_the_other_machine(pair: Pair):
    ended, token = threading.Timer(0.05, lambda: pair.ranks[1].abort(1)), torch.zeros(1)
    ended.start()
    with pytest.raises(CommunicationError, match="rank 1 has ended"):
        pair.ranks[0].receive(token, 1, is_patient=True)
    ended.join()


def test_a_closed_connection_is_the_end_of_its_rank(pair: Pair):
    del pair.ranks[1]
    with pytest.raises(CommunicationError, match="rank 1 has ended"):
        pair.ranks[0].receive(torch.zeros(1), 1, is_patient=True)


def test_who_sends_a_byte_now_and_then_holds_a_place_no_longer_than_others(monkeypatch):
    monkeypatch.setattr(host_links, "GREETING_TIMEOUT_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        stranger = socket.create_connection(listener.getsockname())
        own, _ = listener.accept()
    ended = threading.Event()

    def dribble() -> None:
        with contextlib.suppress(OSError):
            while not ended.wait(0.02):
                stranger.sendall(b"Q")

    thread = threading.Thread(target=dribble)
    thread.start()
    with own, stranger, pytest.raises(TimeoutError):
        try:
            host_links._greet(own, b"key", 0)
        finally:
            ended.set()
            thread.join()


@pytest.mark.parametrize("greeting", [b"", b"GET / HTTP/1.1\r\n\r\n", b"QGR1" + bytes(200)])
def test_strangers_are_not_ranks_and_missing_ones_are_named(greeting: bytes):
    listener = HostListener()
    plan = HostPlan([0, 1, 1], [("127.0.0.1", listener.port), ("127.0.0.1", 1)], new_key())
    stranger = socket.create_connection(("127.0.0.1", listener.port))
    stranger.sendall(greeting)
    with pytest.raises(CommunicationError, match=r"rank 1, 2 did not connect to rank 0 at 127\.0\.0\.1:\d+ within 0 s"):
        listener.accept(plan, 0, 0.2)
    stranger.close()


def test_a_rank_of_another_group_is_refused():
    listeners = [HostListener(), HostListener()]
    addresses = [(one.address, one.port) for one in listeners]
    plans = [HostPlan([0, 1], addresses, new_key()) for _ in range(2)]
    first, second = both(lambda rank: connect_hosts(plans[rank], rank, listeners[rank], 30))
    assert "rank 0 was refused by rank 1" in first.message and "rank 1 was refused by rank 0" in second.message


def test_a_machine_that_cannot_be_reached_is_named():
    listener = HostListener()
    plan = HostPlan([0, 1], [("127.0.0.1", listener.port), ("127.0.0.1", 1)], new_key())
    with pytest.raises(CommunicationError, match=r"rank 0 cannot reach rank 1 at 127\.0\.0\.1:1"):
        connect_hosts(plan, 0, listener, 0.2)
    with pytest.raises(CommunicationError, match=r"cannot listen on 192\.0\.2\.1"):
        HostListener("192.0.2.1")


def test_machines_are_numbered_by_their_first_ranks():
    assert number_hosts(["b", "b", "a", "b"]) == [0, 0, 1, 0]
