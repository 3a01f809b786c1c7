"""A link and a prefill server without engines: connections that end, restarts, floods, late and cancelled jobs."""

from __future__ import annotations

import errno
import queue
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from quire.kv_transfer.pull import link as link_module
from quire.kv_transfer.pull import server as server_module
from quire.kv_transfer.pull.counts import Counts
from quire.kv_transfer.pull.leases import Leases
from quire.kv_transfer.pull.link import Job, Link, Local
from quire.kv_transfer.pull.params import RemotePrefill
from quire.kv_transfer.pull.server import Identity, PrefillServer, Served
from quire.kv_transfer.pull.transport import CacheMemory, InlineTransport
from tests.unit.kv_transfer.test_layout import LAYOUT

NUM_BLOCKS, NAMES = 16, [bytes([number]) * 32 for number in range(16)]


class Cache:
    """Blocks of random bytes in two tensors."""

    def __init__(self, seed: int) -> None:
        numbers = torch.Generator().manual_seed(seed)
        self.tensors = [
            torch.randint(256, (NUM_BLOCKS, *shape), dtype=torch.uint8, generator=numbers) for shape in ((3, 8), (5,))
        ]
        self.memory = CacheMemory(self.tensors, [24, 5])

    def read(self, block_ids: Any) -> list[torch.Tensor]:
        return [tensor[torch.tensor(block_ids)] for tensor in self.tensors]

    def write(self, block_ids: Any, blocks: Any) -> None:
        for tensor, block in zip(self.tensors, blocks, strict=True):
            tensor[torch.tensor(block_ids)] = block


class Pair:
    """A server with a lease of all blocks for request "a", and a link to it."""

    def __init__(self) -> None:
        self.theirs, self.own = Cache(1), Cache(2)
        self.ended: queue.Queue[tuple[Job, set[int]]] = queue.Queue()
        self.counts = Counts()
        self.start_server()
        local = Local(
            Identity("decode", "tcp", LAYOUT), InlineTransport(), self.own, self.own.memory, self.counts,
            lambda job, lost: self.ended.put((job, lost)),
        )  # fmt: skip
        self.link = Link(("127.0.0.1", self.server.port), local)

    def start_server(self, port: int = 0) -> None:
        self.leases = Leases(60.0, 100)
        self.leases.add("a", NAMES, list(range(NUM_BLOCKS)))
        served = Served(self.theirs, self.theirs.memory, b"", is_inline=True)
        identity = Identity("prefill", "tcp", LAYOUT)
        self.server = PrefillServer(("127.0.0.1", port), identity, self.leases, served, Counts())

    def load(self, num: int, **more: Any) -> set[int]:
        """Load the first blocks to the last places; what is lost."""
        remote = RemotePrefill(
            remote_engine_id="prefill", remote_request_id="a", remote_host="127.0.0.1", remote_port=self.server.port,
            remote_num_tokens=0,
        )  # fmt: skip
        places = list(range(NUM_BLOCKS - num, NUM_BLOCKS))
        self.link.submit(Job("b", remote, 0, NAMES[:num], places, **more))
        return self.ended.get(timeout=30)[1]


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.link.close(5.0)
    pair.server.close()


def test_blocks_go_to_their_places(pair):
    before = pair.own.read(range(12))
    assert pair.load(4) == set()
    assert all(map(torch.equal, pair.own.read(range(12, 16)), pair.theirs.read(range(4))))
    assert all(map(torch.equal, pair.own.read(range(12)), before)) and len(pair.leases) == 0


def test_a_connection_that_ended_is_made_again_and_a_restarted_engine_is_another_one(pair):
    assert pair.load(1) == set()
    port = pair.server.port
    pair.server.close()
    pair.start_server(port)
    assert pair.load(2) == set(), "the same engine id: an engine that closed its connection"
    pair.server.close()
    assert pair.load(1) == {15}
    assert pair.counts.take()["failed_jobs"] == 1


def test_a_job_that_is_late_or_given_up_ends_without_a_read(pair):
    assert pair.load(3, deadline=0.0) == {13, 14, 15} and len(pair.leases) == 1
    assert pair.load(3, is_cancelled=True) == {13, 14, 15} and len(pair.leases) == 0
    assert "expired_loads" not in pair.counts.take()


def test_chunks_are_as_long_as_memory_says(pair, monkeypatch):
    monkeypatch.setattr("quire.kv_transfer.pull.transport.CHUNK_BYTES", 3 * 29)
    assert pair.own.memory.chunk_size == 3
    assert pair.load(10) == set()
    assert all(map(torch.equal, pair.own.read(range(6, 16)), pair.theirs.read(range(10))))


def test_a_flood_of_connections_is_bounded_and_ends(pair, monkeypatch):
    monkeypatch.setattr(server_module, "MAX_PEERS", 3)
    address = ("127.0.0.1", pair.server.port)
    flood = [socket.create_connection(address) for _ in range(8)]
    ends = [one for one in flood if _is_closed_without_a_word(one)]
    assert len(ends) == 5
    for one in flood:
        one.close()
    monkeypatch.undo()
    assert pair.load(1) == set()


def _is_closed_without_a_word(sock: socket.socket) -> bool:
    sock.settimeout(30)
    return sock.recv(1) == b""


def test_an_engine_that_cannot_be_reached_is_not_tried_at_once_again(pair):
    pair.server.close()
    assert pair.load(1) == {15}
    tried: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(link_module.socket, "create_connection", lambda *args: tried.append(args))
        assert pair.load(1) == {15} and not tried


def test_closing_ends_a_job_that_hangs(pair):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        link = Link(("127.0.0.1", silent.getsockname()[1]), pair.link._local)
        remote = RemotePrefill(
            remote_engine_id="x", remote_request_id="a", remote_host="127.0.0.1", remote_port=1, remote_num_tokens=0
        )
        link.submit(Job("b", remote, 0, NAMES[:1], [3]))
        assert not link.is_idle
        silent.accept()[0].close()
        assert pair.ended.get(timeout=30)[1] == {3}
        link.close(5.0)
    assert link.is_idle and all(thread.name != link._thread.name for thread in threading.enumerate())


def test_a_server_without_files_for_connections_waits_before_it_tries_again(monkeypatch):
    server: Any = PrefillServer.__new__(PrefillServer)
    server._is_closed = False

    class Full:
        def accept(self):
            raise OSError(errno.EMFILE, "Too many open files")

        def fileno(self):
            return 0

    waits: list[float] = []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        server._is_closed = len(waits) == 3

    server._listener = Full()
    monkeypatch.setattr("quire.kv_transfer.pull.server.time.sleep", wait)
    server._accept()
    assert len(waits) == 3 and min(waits) > 0
