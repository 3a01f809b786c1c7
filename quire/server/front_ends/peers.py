"""Peers of a front end: what it asks of the others, and what they ask of it. Owns the calls of a front end for others.

Counts and recent requests are asked for through the owner. A request about a response that another front end makes in
the background is forwarded there, over a socket that only this user can reach.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import h11
import msgspec
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from quire.engine.front_ends.messages import OwnerAnswer, OwnerCall, Report, ReportWanted
from quire.engine.front_ends.remote import RemoteEngine
from quire.logger import get_logger
from quire.metrics.family_sums import Family, families_of, merged
from quire.server.http.errors import UNAVAILABLE, ApiError
from quire.server.http.peers import FORWARDED, ResponseKey, Route
from quire.server.http.recent_requests import RecentRequests, RequestTimeline
from quire.server.http.request_scope import scope_of

MAX_KNOWN = 20_000
READ_BYTES = 1 << 16
DROPPED = frozenset((b"connection", b"transfer-encoding", b"keep-alive", b"content-length", b"x-request-id"))

logger = get_logger(__name__)

_decode_families = msgspec.msgpack.Decoder(list[Family]).decode
_decode_timelines = msgspec.msgpack.Decoder(list[RequestTimeline]).decode


class FrontEndPeers:
    """The other front ends, to one of them.

    Args:
        owner: the way to them.
        directory: of their sockets.
        slot: of this one.
    """

    def __init__(self, owner: RemoteEngine, directory: Path, slot: int) -> None:
        self._owner = owner
        self._directory = directory
        self._slot = slot

    async def families(self, own: Collector) -> list[Family]:
        """As `Peers`."""
        reports = await self._reports("metrics")
        return merged([families_of(own), *map(_decode_families, reports)])

    async def requests(self) -> list[RequestTimeline]:
        """As `Peers`."""
        return [one for report in await self._reports("requests") for one in _decode_timelines(report)]

    async def claim(self, key: ResponseKey) -> None:
        """As `Peers`."""
        await self._owner.ask("claim_response", key=key, number=self._slot)

    def where_made(self, route: Route, is_here: Callable[[ResponseKey], bool]) -> Route:
        """As `Peers`."""

        async def routed(request: Request) -> Response:
            key = scope_of(request).tenant.name, request.path_params["response_id"]
            if not request.scope.get("state", {}).get(FORWARDED) and not is_here(key):
                slot = (await self._owner.ask("find_response", key=key)).number
                if slot is not None and slot != self._slot:
                    return await _forward(request, self._directory / socket_name(slot))
            return await route(request)

        routed.__doc__ = route.__doc__
        return routed

    async def _reports(self, kind: str) -> list[bytes]:
        return (await self._owner.ask("reports", data=kind.encode())).reports


def socket_name(slot: int) -> str:
    """The socket of a front end, on which the others reach it."""
    return f"front-{slot}"


class Reporter:
    """Answers what others want to know of this front end.

    Args:
        owner: through whom they ask.
        series: of this front end.
        recent: its requests; None = they are not kept.
    """

    def __init__(self, owner: RemoteEngine, series: Callable[[], Collector], recent: RecentRequests | None) -> None:
        self._owner = owner
        self._series = series
        self._recent = recent

    def report(self, wanted: ReportWanted) -> None:
        """Send what is wanted."""
        content: object = []
        if wanted.kind == "metrics":
            content = families_of(self._series())
        elif self._recent is not None:
            content = list(self._recent.timelines())
        self._owner.send(Report(wanted.report_id, msgspec.msgpack.encode(content)))


class ResponsePlaces:
    """In the owner: which front end makes which response in the background; the oldest are forgotten."""

    def __init__(self) -> None:
        self._slots: OrderedDict[ResponseKey, int] = OrderedDict()

    async def claim(self, serial: int, call: OwnerCall) -> OwnerAnswer:
        """A front end makes a response."""
        self._slots.pop(call.key, None)
        self._slots[call.key] = call.number
        if len(self._slots) > MAX_KNOWN:
            self._slots.popitem(last=False)
        return OwnerAnswer(call.call_id)

    async def find(self, serial: int, call: OwnerCall) -> OwnerAnswer:
        """Who makes it, or has made it."""
        return OwnerAnswer(call.call_id, number=self._slots.get(call.key))

    def remove_slot(self, slot: int) -> None:
        """A front end has ended, and what it made with it."""
        for key in [key for key, one in self._slots.items() if one == slot]:
            del self._slots[key]


async def _forward(request: Request, path: Path) -> Response:
    """The answer of another front end to a request without a body.

    Raises:
        ApiError: it cannot be reached.
    """
    target = request.scope["raw_path"]
    if request.scope["query_string"]:
        target += b"?" + request.scope["query_string"]
    headers = [(name, value) for name, value in request.scope["headers"] if name not in DROPPED]
    headers += [(b"x-request-id", scope_of(request).request_id.encode()), (b"connection", b"close")]
    peer = _Exchange()
    try:
        await peer.send(path, h11.Request(method=request.method, target=target, headers=headers))
        head = await peer.head()
    except (OSError, h11.ProtocolError) as error:
        peer.close()
        logger.warning("the front end that makes a response cannot be reached: %s", error)
        raise ApiError(UNAVAILABLE, "the process that makes this response cannot be reached", retry_after_s=1) from None
    response = StreamingResponse(peer.body(), status_code=head.status_code)
    response.raw_headers = [(name, value) for name, value in head.headers if name not in DROPPED]
    return response


class _Exchange:
    """One request to another front end, and its answer."""

    def __init__(self) -> None:
        self._http = h11.Connection(h11.CLIENT)
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def send(self, path: Path, request: h11.Request) -> None:
        self._reader, self._writer = await asyncio.open_unix_connection(path)
        self._writer.write((self._http.send(request) or b"") + (self._http.send(h11.EndOfMessage()) or b""))
        await self._writer.drain()

    async def head(self) -> h11.Response:
        while True:
            event = await self._event()
            if isinstance(event, h11.Response):
                return event

    async def body(self) -> AsyncIterator[bytes]:
        try:
            while True:
                event = await self._event()
                if isinstance(event, h11.Data):
                    yield bytes(event.data)
                elif isinstance(event, h11.EndOfMessage):
                    return
        finally:
            self.close()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    async def _event(self) -> h11.Event:
        assert self._reader is not None, "`send` was called"
        while True:
            event = self._http.next_event()
            if event is h11.NEED_DATA:
                self._http.receive_data(await self._reader.read(READ_BYTES))
            elif isinstance(event, h11.Event):
                return event
            else:
                raise h11.RemoteProtocolError("the connection was closed")
