"""StrictConnection: uvicorn's connection over llhttp (`httptools`), without the leniencies of either.

`connection_limits.LimitedConnection` stands on it. A head that two programs could read differently is refused, trailers
never become headers, what is not body is bounded, HTTP/1.0 gets an answer without chunks, and every request of a
connection that is lost ends, pipelined ones included. Owns how far the request that is being received has come.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from enum import Enum, auto
from typing import Any

import httptools
from uvicorn import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from quire.server.http.lingering import close_lingering

FRAMING_BYTES = 16
"""Of a chunk: its size in hexadecimal, line ends, and some room for extensions."""
VERSIONS = ("1.0", "1.1")
SINGLE_HEADERS = (b"host", b"content-length", b"transfer-encoding")


class Phase(Enum):
    """What of a request is expected next."""

    HEAD = auto()
    BODY = auto()
    DONE = auto()


class HeadError(Exception):
    """The head is ambiguous or not HTTP/1."""


class StrictConnection(HttpToolsProtocol):
    """A connection that refuses what is not plainly HTTP/1.

    Attributes:
        phase: HEAD until the first head is complete; DONE when a request has been received and no byte of the next.
    """

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.phase = Phase.HEAD
        self._is_upgrade = False
        self._is_lingering = False
        self._num_other_bytes = 0
        self._num_body_bytes = 0
        self._open: list[RequestResponseCycle] = []

    @property
    def max_head_bytes(self) -> int:
        """The most that a head may take."""
        return self.config.h11_max_incomplete_event_size or 0

    @property
    def is_head_too_large(self) -> bool:
        """True when a head that is not complete exceeds its limit."""
        return self.phase is Phase.HEAD and self._num_other_bytes > self.max_head_bytes

    def data_received(self, data: bytes) -> None:
        """Take in what the client sent."""
        if self._is_upgrade or self.parser is None:
            return
        self._num_other_bytes += len(data)
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:  # never done: the request is answered, what follows is not HTTP/1
            self._is_upgrade = True
            self.cycle.keep_alive = False
            return
        except httptools.HttpParserError:
            self.send_400_response("")
            return
        if self.is_head_too_large or self._num_other_bytes > self._most_other_bytes():
            self.send_400_response("")

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone, and with it all of its requests."""
        self.pipeline.clear()
        for cycle in self._open:
            cycle.disconnected = True
            cycle.message_event.set()
        self._open.clear()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        """The first byte of a request."""
        self.phase = Phase.HEAD
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header; a trailer is left out."""
        if self.phase is Phase.HEAD:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The head of a request is complete.

        Raises:
            HeadError: it is refused.
        """
        check_head(self.parser.get_http_version(), self.url, self.headers)
        self.phase = Phase.BODY
        self._num_body_bytes = 0
        super().on_headers_complete()
        self._open = [cycle for cycle in self._open if not cycle.response_complete]
        self._open.append(self.cycle)
        self.cycle.transport = _CycleTransport(self)  # type: ignore[assignment]
        if self.scope["http_version"] == "1.0":
            self.cycle.send = without_chunks(self.cycle)  # type: ignore[method-assign, assignment]

    def on_body(self, body: bytes) -> None:
        """A piece of a request's body."""
        self._num_other_bytes -= len(body)
        self._num_body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The last byte of a request."""
        self.phase = Phase.DONE
        self._num_other_bytes = 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """The last byte of an answer is written."""
        if self._is_lingering:
            self.server_state.total_requests += 1
        else:
            super().on_response_complete()

    def close_answered(self) -> None:
        """Close after the last answer, which a client that still sends its request can read."""
        if self.phase is Phase.DONE or self._is_lingering or self.transport.is_closing():
            self.transport.close()
            return
        self._is_lingering = True
        self._unset_keepalive_if_required()
        close_lingering(self.transport, self, self.loop)

    def _most_other_bytes(self) -> int:
        """Head, framing, chunk extensions and trailers: small chunks cost several times what they carry."""
        return 2 * self.max_head_bytes + FRAMING_BYTES * self._num_body_bytes


class _CycleTransport:
    """What a request's cycle writes its answer to."""

    __slots__ = ("close", "is_closing", "write")

    def __init__(self, connection: StrictConnection) -> None:
        self.write = connection.transport.write
        self.is_closing = connection.transport.is_closing
        self.close = connection.close_answered


def check_head(version: str, target: bytes, headers: list[tuple[bytes, bytes]]) -> None:
    """Refuse a head that a proxy in front may have read differently (RFC 9112, sections 3.2 and 6.1).

    Args:
        target: of the request line; only a path is taken.
        headers: names in lower case.

    Raises:
        HeadError: it is refused.
    """
    if version not in VERSIONS:
        raise HeadError(f"HTTP/{version}")
    if not target.startswith(b"/"):
        raise HeadError("the target is not a path")
    names = [name for name, _ in headers]
    if any(names.count(name) > 1 for name in SINGLE_HEADERS):
        raise HeadError("a duplicate header that must be unique")
    given = dict(headers)
    if version == "1.1" and b"host" not in given:
        raise HeadError("no host")
    if given.get(b"transfer-encoding", b"chunked").lower() != b"chunked":
        raise HeadError("a transfer-encoding other than chunked")
    if version == "1.0" and b"transfer-encoding" in given:
        raise HeadError("chunks in HTTP/1.0")


def without_chunks(cycle: RequestResponseCycle) -> Callable[[Any], Awaitable[None]]:
    """`cycle.send` for HTTP/1.0, where a body without a length ends with its connection."""
    send, has_length = cycle.send, True

    async def send_plain(message: Any) -> None:
        nonlocal has_length
        if message["type"] == "http.response.start":
            has_length = any(name.lower() == b"content-length" for name, _ in message["headers"])
            cycle.keep_alive = False
            if not has_length:
                cycle.chunked_encoding = False
        elif not has_length:
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    return send_plain
