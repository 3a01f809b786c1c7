"""Reports: what front ends ask of each other through the owner, and the owner's own part of the metrics.

Used by the owner. Owns what front ends that have ended had counted.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping

import msgspec
from prometheus_client.registry import Collector

from quire.engine.front_ends.hub import FrontEndPeer
from quire.engine.front_ends.messages import OwnerAnswer, OwnerCall, Report, ReportWanted
from quire.engine.process_watch import ProcessWatch
from quire.logger import get_logger
from quire.metrics.family_sums import ADDED_TYPES, Family, families_of, merged

TIMEOUT_S = 2.0
"""For which a front end may be busy before a report is made without it: what it has counted stands for its metrics."""

logger = get_logger(__name__)

_decode = msgspec.msgpack.Decoder(list[Family]).decode


class Reports:
    """Asks front ends.

    Args:
        series: what the owner counts.
        peers: the front ends that serve, by serial number.
        watch: of the cores' processes, which are looked at anew.
    """

    def __init__(self, series: Callable[[], Collector], peers: Mapping[int, FrontEndPeer], watch: ProcessWatch) -> None:
        self._watch = watch
        self._series = series
        self._peers = peers
        self._ids = itertools.count()
        self._waiting: dict[tuple[int, int], asyncio.Future[bytes]] = {}
        self._latest: dict[int, list[Family]] = {}
        self._ended: list[Family] = []

    async def answer(self, serial: int, call: OwnerCall) -> OwnerAnswer:
        """A front end wants the reports of the others; metrics come with those of the owner and of the past."""
        kind = call.data.decode()
        if kind == "metrics":
            await self._watch.look()
        others = [peer for peer in self._peers.values() if peer.serial != serial]
        ended = self._ended  # one that ends meanwhile is among the others
        reports = await asyncio.gather(*(self._ask(peer, kind) for peer in others))
        found = [one for one in reports if one is not None]
        if kind == "metrics":
            for peer, report in zip(others, reports, strict=True):
                if report is not None:
                    self._latest[peer.serial] = _decode(report)
            silent = [
                self._known(peer.serial, peer.counted())
                for peer, one in zip(others, reports, strict=True) if one is None
            ]  # fmt: skip
            own = merged([families_of(self._series()), ended, *silent])
            found.append(msgspec.msgpack.encode(own))
        return OwnerAnswer(call.call_id, reports=found)

    def take(self, serial: int, report: Report) -> None:
        """A front end has answered."""
        waiting = self._waiting.get((serial, report.report_id))
        if waiting is not None and not waiting.done():
            waiting.set_result(report.data)

    def remove(self, serial: int, counted: list[Family]) -> None:
        """A front end has ended; what it had counted stays counted."""
        known = self._known(serial, counted)
        self._ended = merged([self._ended, [one for one in known if one.type in ADDED_TYPES]])
        self._latest.pop(serial, None)
        for (of, _), waiting in self._waiting.items():
            if of == serial and not waiting.done():
                waiting.cancel()

    def _known(self, serial: int, counted: list[Family]) -> list[Family]:
        """What it has counted, and of the rest, such as its CPU time, what it reported last."""
        names = {one.name for one in counted}
        return [*counted, *(one for one in self._latest.get(serial, ()) if one.name not in names)]

    async def _ask(self, peer: FrontEndPeer, kind: str) -> bytes | None:
        report_id = next(self._ids)
        waiting: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._waiting[peer.serial, report_id] = waiting
        try:
            peer.send(ReportWanted(report_id, kind))
            await asyncio.wait([waiting], timeout=TIMEOUT_S)
            return waiting.result() if waiting.done() and not waiting.cancelled() else None
        finally:
            del self._waiting[peer.serial, report_id]
