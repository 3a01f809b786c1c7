"""What goes between the processes of several front ends: messages, counts that outlive one, ids of responses."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from typing import Any

import msgspec
import numpy as np
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, values

from quire.engine.front_ends.link import FrontEndLink
from quire.engine.front_ends.messages import OwnerCall
from quire.metrics.count_page import CountPage
from quire.metrics.family_sums import families_of, merged
from quire.metrics.histogram import QuickHistogram, own_row
from quire.server.front_ends.peers import Arrivals, ResponsePlaces
from quire.utils.children import wait_for_end


class Note(msgspec.Struct, frozen=True, tag="note"):
    """A message of the test."""

    number: int
    array: np.ndarray


def test_messages_of_any_size_come_in_order_and_a_reader_that_is_late_is_not_waited_for():
    async def run() -> list[Note]:
        near, far = (FrontEndLink[Note](one, Note, "other") for one in socket.socketpair())
        sizes = [0, 5, 1 << 20, 3, 300_000, 1]
        for number, size in enumerate(sizes):
            near.send(Note(number, np.arange(size, dtype=np.int32)))
        came: list[Note] = []
        near.listen(came.append)
        far.listen(came.append)
        far._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        near._socket.send(b"")  # nothing
        while len(came) < len(sizes):
            await asyncio.sleep(0.001)
        near._write([b"\x01\x00\x00\x00\x01" + bytes(7) + b"\xff"])  # a message that is none is left out
        near.send(Note(99, np.zeros(2, np.int32)))
        while len(came) <= len(sizes):
            await asyncio.sleep(0.001)
        for link in (near, far, near):
            link.close()
        return came

    came = asyncio.run(run())
    assert [one.number for one in came] == [0, 1, 2, 3, 4, 5, 99]
    assert [len(one.array) for one in came] == [0, 5, 1 << 20, 3, 300_000, 1, 2]
    assert came[2].array.tolist() == list(range(1 << 20))


def test_what_a_process_has_counted_is_read_after_its_death_and_adds_up_with_that_of_others(monkeypatch):
    def made() -> tuple[CollectorRegistry, Any]:
        registry = CollectorRegistry()
        counter = Counter("asked", "Asked.", ["who"], registry=registry)
        times = Histogram("times", "Times.", ["who"], buckets=(1.0, 2.0), registry=registry)
        quick = QuickHistogram("quick", "Quick.", (0.5, 5.0), {"who": "x"}, registry)
        Gauge("now", "Now.", registry=registry).set(7)
        counter.labels("a").inc(3)
        counter.labels("b").inc()
        for value in (0.5, 1.5, 9.0):
            times.labels("a").observe(value)
            quick.observe(value, 2)
        return registry, quick

    monkeypatch.setattr(QuickHistogram, "new_row", staticmethod(own_row))
    monkeypatch.setattr(values, "ValueClass", values.ValueClass)
    page = CountPage.create()
    own, alone = made()
    CountPage(os.dup(page.fd)).install()  # as in the process that counts
    shared, together = made()
    assert together.distribution() == alone.distribution()
    page.close()

    def shown(families: Any) -> dict[Any, float]:
        return {
            (name, tuple(sorted(labels.items()))): value
            for one in families for name, labels, value in one.samples
            if one.name != "now" and not name.endswith("_created")
        }  # fmt: skip

    assert shown(page.families()) == shown(families_of(own)) == shown(families_of(shared))
    twice = shown(merged([families_of(own), page.families()]))
    assert twice == {name: 2 * value for name, value in shown(families_of(own)).items()}


def test_series_that_have_no_room_are_counted_all_the_same(monkeypatch):
    monkeypatch.setattr("quire.metrics.count_page.MAX_CELLS", 2)
    page = CountPage.create()
    first, second = page._new_row("a", "A.", ["1.0"], {}), page._new_row("b", "B.", ["1.0"], {})
    first[0], second[0] = 4.0, 5.0
    assert [one.name for one in page.families()] == ["a"] and second[0] == 5.0


def test_an_id_is_of_one_front_end_until_it_is_released_or_has_ended():
    places = ResponsePlaces()

    def call(number: int, key: str = "a", **more: Any) -> OwnerCall:
        return OwnerCall(0, "", key=("t", key), number=number, **more)

    async def run() -> None:
        assert (await places.claim(1, call(0))).value and (await places.claim(1, call(0))).value
        assert not (await places.claim(2, call(1))).value and places.made_at(("t", "a")) == 0
        await places.release(2, call(1))
        assert not (await places.claim(2, call(1))).value, "it was not its own"
        await places.release(1, call(0, flag=True))
        assert places.made_at(("t", "a")) == 0 and (await places.claim(2, call(1))).value
        places.remove_slot(1)
        assert places.made_at(("t", "a")) == 0 and places.made_at(("t", "b")) is None
        places.remove_slot(0)
        assert places.made_at(("t", "a")) is None

    asyncio.run(run())


def test_a_connection_that_was_asked_for_is_found_whether_it_comes_before_its_answer_or_after():
    async def run() -> None:
        arrivals = Arrivals()
        one, other = socket.socketpair()
        arrivals.put(1, one)
        assert await arrivals.get(1) is one
        waiting = asyncio.ensure_future(arrivals.get(2))
        await asyncio.sleep(0)
        arrivals.put(2, other)
        assert await waiting is other and not arrivals._by_call
        one.close()
        other.close()

    asyncio.run(run())


def test_the_end_of_a_child_is_waited_for_without_polling():
    with subprocess.Popen([sys.executable, "-S", "-c", "import signal; signal.pause()"]) as child:
        assert wait_for_end(child, 0.01) is None
        child.kill()
        assert wait_for_end(child, 60.0) == wait_for_end(child, 0.0) == -signal.SIGKILL
