"""StreamingProtocol: uvicorn's connection, with a way for a streamed body past the layers of ASGI.

Given to uvicorn by the launcher, used by `EventStream`. uvicorn writes the head and the end of such a response; a piece
of its body is framed here and written at once, which leaves uvicorn's state as it is: it does not count chunks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from starlette.types import Message, Scope, Send
from uvicorn import Config
from uvicorn.server import ServerState

from quire.config.server import LimitsConfig
from quire.engine.output_stream import noop
from quire.server.http.connection_limits import LimitedConnection, max_connections

STATE_KEY = "connection"


class BodyWriter:
    """Writes the body of one streamed response, after its head and before its end.

    Args:
        write: takes bytes for the client.
        is_chunked: the body has no length, and the client knows chunks (HTTP/1.1).
        is_writable: whether the client takes anything now.

    Attributes:
        is_writable: False while the client is slow to read, and once it is gone.
        on_writable: called when it is true again; raises nothing.
    """

    __slots__ = ("_is_chunked", "_write", "is_writable", "on_writable")

    def __init__(self, write: Callable[[bytes], None], *, is_chunked: bool, is_writable: bool) -> None:
        self._write = write
        self._is_chunked = is_chunked
        self.is_writable = is_writable
        self.on_writable: Callable[[], None] = noop

    def write(self, data: bytes) -> None:
        """Write a piece, which is not empty."""
        self._write(b"%x\r\n%b\r\n" % (len(data), data) if self._is_chunked else data)


class StreamingProtocol(LimitedConnection):
    """A connection that the handlers of its requests find by `body_writer_of`."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, {**app_state, STATE_KEY: self}, _loop)
        self._body: BodyWriter | None = None

    def body_writer(self, scope: Scope) -> BodyWriter:
        """The writer for the response to the request of `scope`, whose head was just sent."""
        self._body = BodyWriter(
            self.transport.write,
            is_chunked=scope["http_version"] != "1.0",
            is_writable=not (self.flow.write_paused or self.transport.is_closing()),
        )
        return self._body

    def pause_writing(self) -> None:
        """As `asyncio.Protocol.pause_writing`."""
        super().pause_writing()
        if self._body is not None:
            self._body.is_writable = False

    def resume_writing(self) -> None:
        """As `asyncio.Protocol.resume_writing`."""
        super().resume_writing()
        if self._body is not None and not self.transport.is_closing():
            self._body.is_writable = True
            self._body.on_writable()

    def connection_lost(self, exc: Exception | None) -> None:
        """As `asyncio.Protocol.connection_lost`."""
        if self._body is not None:
            self._body.is_writable = False
            self._body = None
        super().connection_lost(exc)


def protocol_factory(
    limits: LimitsConfig, kind: type[StreamingProtocol] = StreamingProtocol
) -> Callable[..., StreamingProtocol]:
    """What uvicorn calls for each connection, to make one of a kind."""
    most, refused = max_connections(limits), set[LimitedConnection]()

    def make(**arguments: Any) -> StreamingProtocol:
        connection = kind(**arguments)
        connection.max_connections, connection.refused = most, refused
        return connection

    return make


def body_writer_of(scope: Scope) -> BodyWriter:
    """The writer for the body of the response to a request, whose head was just sent."""
    connection: StreamingProtocol | SentBody = scope["state"][STATE_KEY]
    return connection.body_writer(scope)


class SentBody:
    """The connection of one request under a server that is not ours: pieces of a streamed body go through its `send`.

    Args:
        send: of ASGI, the other server's.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self._pieces: list[bytes] = []
        self._lock = asyncio.Lock()
        self._sending: asyncio.Task[None] | None = None

    def body_writer(self, scope: Scope) -> BodyWriter:
        """As `StreamingProtocol.body_writer`."""
        return BodyWriter(self._write, is_chunked=False, is_writable=True)

    async def send(self, message: Message) -> None:
        """As ASGI's, for the layers above: what was written goes first."""
        await self._flush()
        await self._send(message)

    def _write(self, data: bytes) -> None:
        self._pieces.append(data)
        if self._sending is None or self._sending.done():
            self._sending = asyncio.ensure_future(self._flush())

    async def _flush(self) -> None:
        async with self._lock:
            while self._pieces:
                body = b"".join(self._pieces)
                self._pieces.clear()
                await self._send({"type": "http.response.body", "body": body, "more_body": True})
