"""Peers of a front end: what it asks of the others, and what they ask of it. Owns the calls of a front end for others.

Counts and recent requests are asked for through the owner. A request about a response that another front end makes in
the background is forwarded there, over a connection that the owner makes between the two.
"""

from __future__ import annotations

import asyncio
import socket
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable

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
from quire.server.usage.ledger import UsageLedger

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
        arrivals: where connections to them come.
        slot: of this one.
    """

    def __init__(self, owner: RemoteEngine, arrivals: Arrivals, slot: int) -> None:
        self._owner = owner
        self._arrivals = arrivals
        self._slot = slot

    async def families(self, own: Collector) -> list[Family]:
        """As `Peers`."""
        reports = await self._reports("metrics")
        return merged([families_of(own), *map(_decode_families, reports)])

    async def requests(self) -> list[RequestTimeline]:
        """As `Peers`."""
        return [one for report in await self._reports("requests") for one in _decode_timelines(report)]

    async def write_usage(self) -> None:
        """As `Peers`."""
        await self._reports("usage")

    async def claim(self, key: ResponseKey) -> bool:
        """As `Peers`."""
        return bool((await self._owner.ask("claim_response", key=key, number=self._slot)).value)

    def release(self, key: ResponseKey, *, is_made: bool) -> None:
        """As `Peers`."""
        if not self._owner.has_stopped:
            self._owner.send(OwnerCall(-1, "release_response", key=key, number=self._slot, flag=is_made))

    def where_made(self, route: Route, is_here: Callable[[ResponseKey], bool]) -> Route:
        """As `Peers`."""

        async def routed(request: Request) -> Response:
            key = scope_of(request).tenant.name, request.path_params["response_id"]
            if not request.scope.get("state", {}).get(FORWARDED) and not is_here(key):
                found = await self._owner.ask("reach_response", key=key, number=self._slot)
                if found.number is not None:
                    return await _forward(request, await self._arrivals.get(found.number))
            return await route(request)

        routed.__doc__ = route.__doc__
        return routed

    async def _reports(self, kind: str) -> list[bytes]:
        return (await self._owner.ask("reports", data=kind.encode())).reports


class Arrivals:
    """Connections to other front ends, which come through another socket than the answers of their calls."""

    def __init__(self) -> None:
        self._by_call: dict[int, asyncio.Future[socket.socket]] = {}

    def put(self, call_id: int, connection: socket.socket) -> None:
        """The connection that a call has asked for has come."""
        self._of(call_id).set_result(connection)

    async def get(self, call_id: int) -> socket.socket:
        """The connection of a call whose answer has come, so that it is on its way at least."""
        try:
            return await asyncio.shield(self._of(call_id))
        finally:
            self._by_call.pop(call_id, None)

    def _of(self, call_id: int) -> asyncio.Future[socket.socket]:
        return self._by_call.setdefault(call_id, asyncio.get_running_loop().create_future())


class Reporter:
    """Answers what others want to know of this front end.

    Args:
        owner: through whom they ask.
        series: of this front end.
        recent: its requests; None = they are not kept.
        ledger: what tenants used; None = it is not kept.
    """

    def __init__(
        self, owner: RemoteEngine, series: Callable[[], Collector], recent: RecentRequests | None,
        ledger: UsageLedger | None,
    ) -> None:  # fmt: skip
        self._ledger = ledger
        self._writing: set[asyncio.Task[None]] = set()
        self._owner = owner
        self._series = series
        self._recent = recent

    def report(self, wanted: ReportWanted) -> None:
        """Send what is wanted."""
        content: object = []
        if wanted.kind == "usage" and self._ledger is not None:
            task = asyncio.get_running_loop().create_task(self._write(wanted, self._ledger))
            self._writing.add(task)
            task.add_done_callback(self._writing.discard)
            return
        if wanted.kind == "metrics":
            content = families_of(self._series())
        elif wanted.kind == "requests" and self._recent is not None:
            content = list(self._recent.timelines())
        self._owner.send(Report(wanted.report_id, msgspec.msgpack.encode(content)))

    async def _write(self, wanted: ReportWanted, ledger: UsageLedger) -> None:
        await asyncio.to_thread(ledger.flush)
        self._owner.send(Report(wanted.report_id, b""))


class ResponsePlaces:
    """In the owner: which front end makes which response, and which ids requests under way have.

    An id is held from a `claim` to its `release`. Where a response was made in the background stays known, as its
    events are there; the oldest of these are forgotten.
    """

    def __init__(self) -> None:
        self._held: dict[ResponseKey, int] = {}
        self._made: OrderedDict[ResponseKey, int] = OrderedDict()

    async def claim(self, serial: int, call: OwnerCall) -> OwnerAnswer:
        """A front end takes an id; False = another one has it."""
        is_free = self._held.setdefault(call.key, call.number) == call.number
        return OwnerAnswer(call.call_id, value=is_free)

    async def release(self, serial: int, call: OwnerCall) -> OwnerAnswer:
        """It is free again; with `flag` its response was made in the background there."""
        if self._held.get(call.key) == call.number:
            del self._held[call.key]
            self._made.pop(call.key, None)
            if call.flag:
                self._made[call.key] = call.number
                if len(self._made) > MAX_KNOWN:
                    self._made.popitem(last=False)
        return OwnerAnswer(call.call_id)

    def made_at(self, key: ResponseKey) -> int | None:
        """The front end that makes a response, or has made it."""
        return self._held.get(key, self._made.get(key))

    def remove_slot(self, slot: int) -> None:
        """A front end has ended, and what it made with it."""
        for places in (self._held, self._made):
            for key in [key for key, one in places.items() if one == slot]:
                del places[key]


async def _forward(request: Request, connection: socket.socket) -> Response:
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
        await peer.send(connection, h11.Request(method=request.method, target=target, headers=headers))
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

    async def send(self, connection: socket.socket, request: h11.Request) -> None:
        connection.setblocking(False)
        self._reader, self._writer = await asyncio.open_unix_connection(sock=connection)
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
