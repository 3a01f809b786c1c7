"""Connections to the server under test: one request at a time on each, kept for the next.

Called by `load`. Owns the idle connections. Reads with a protocol, not with streams: a client that spends its time on
itself measures itself.
"""

from __future__ import annotations

import asyncio
import errno
import ssl
import time
from collections.abc import Callable
from typing import cast

from quire.bench.answer_stream import AnswerReader, refusal
from quire.bench.http_response import ResponseError, ResponseParser
from quire.bench.records import Failure, Target

MAX_BODY_BYTES = 1 << 20
LOCAL_ERRORS = frozenset((errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS, errno.ENOMEM))

Clock = Callable[[], float]


class Answer:
    """What comes back for one request.

    Attributes:
        reader: of the stream; empty when the response is none.
        body: of a response that is no stream, up to a limit.
        headers: of the response, by lower-case name.
        ended_s: when the response was complete or failed; 0 = neither.
        failure: None = a complete answer.
    """

    def __init__(self) -> None:
        self.reader = AnswerReader()
        self.body = b""
        self.status = 0
        self.headers: dict[str, str] = {}
        self.ended_s = 0.0
        self.failure: Failure | None = None


class Connection(asyncio.Protocol):
    """One connection.

    Args:
        clock: seconds, monotonic.
        max_body_bytes: how much is kept of a response that is no stream.
    """

    def __init__(self, clock: Clock = time.monotonic, max_body_bytes: int = MAX_BODY_BYTES) -> None:
        self._clock = clock
        self._max_body_bytes = max_body_bytes
        self._transport: asyncio.Transport | None = None
        self._parser = ResponseParser()
        self._answer = Answer()
        self._done: asyncio.Future[None] | None = None
        self._is_stream = False
        self.is_open = False
        self.has_reply = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """As `asyncio.Protocol`."""
        self._transport = cast(asyncio.Transport, transport)  # that of uvloop is no subclass
        self.is_open = True

    async def ask(self, request: bytes) -> Answer:
        """Send a request and wait for the whole response; failures are in the answer."""
        assert self._transport is not None and self._done is None, "one request at a time"
        self._parser, self._answer, self._is_stream = ResponseParser(), Answer(), False
        self.has_reply = False
        if not self.is_open:  # closed as soon as it was accepted
            self._fail_unsent()
            return self._answer
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            await self._done
        finally:
            self._done = None
        return self._answer

    def data_received(self, data: bytes) -> None:
        """As `asyncio.Protocol`."""
        now = self._clock()
        self.has_reply = True
        if self._done is None or self._done.done():
            self.close()  # nothing was asked
            return
        parser = self._parser
        try:
            body = parser.feed(data)
        except ResponseError as error:
            self._fail(error, now)
            return
        if body or parser.is_complete:
            self._take(body, now)

    def connection_lost(self, error: Exception | None) -> None:
        """As `asyncio.Protocol`."""
        self.is_open = False
        if self._done is None or self._done.done():
            return
        now = self._clock()
        try:
            if error is not None:
                raise ResponseError("early close", f"the connection broke: {error}")
            self._parser.end()
        except ResponseError as reason:
            self._fail(reason, now)
            return
        self._take(b"", now)

    def close(self) -> None:
        """Close it; safe to repeat."""
        self.is_open = False
        if self._transport is not None:
            self._transport.abort()

    def _take(self, body: bytes, now: float) -> None:
        answer, parser = self._answer, self._parser
        if not answer.status:
            answer.status, answer.headers = parser.status, parser.headers
            kind = parser.headers.get("content-type", "")
            self._is_stream = parser.status == 200 and kind.startswith("text/event-stream")
        if self._is_stream:
            answer.reader.feed(body, now)
        elif len(answer.body) < self._max_body_bytes:
            answer.body += body
        if parser.is_complete:
            self._finish(now)

    def _finish(self, now: float) -> None:
        answer = self._answer
        answer.ended_s = now
        if self._is_stream:
            answer.reader.end(now)
            answer.failure = answer.reader.failure
        elif answer.status != 200:
            answer.failure = refusal(answer.status, answer.body)
        if not self._parser.keeps_alive:
            self.close()
        assert self._done is not None
        self._done.set_result(None)

    def _fail_unsent(self) -> None:
        self._answer.ended_s = self._clock()
        self._answer.failure = Failure("early close", "the server closed the connection before the request")

    def _fail(self, error: ResponseError, now: float) -> None:
        answer = self._answer
        answer.ended_s = now
        answer.failure = answer.reader.failure or Failure(error.kind, str(error))
        self.close()
        assert self._done is not None
        self._done.set_result(None)


class ConnectionPool:
    """Connections to one target.

    Args:
        clock: seconds, monotonic.
        max_body_bytes: as of `Connection`.
    """

    def __init__(self, target: Target, clock: Clock = time.monotonic, max_body_bytes: int = MAX_BODY_BYTES) -> None:
        self._max_body_bytes = max_body_bytes
        self._target = target
        self._clock = clock
        self._idle: list[Connection] = []
        self._host = target.host  # its address, once known: names are not looked up for every connection
        self._tls = tls_context(target)

    async def ask(self, request: bytes, timeout_s: float) -> Answer:
        """Send a request on an idle connection or a new one; failures are in the answer."""
        try:
            return await asyncio.wait_for(self._ask(request), timeout_s)
        except asyncio.TimeoutError:
            answer = Answer()
            answer.failure = Failure("timeout", f"no complete response after {timeout_s:g} s")
        except OSError as error:
            answer = Answer()
            answer.failure = Failure("connect", str(error) or type(error).__name__, error.errno in LOCAL_ERRORS)
        answer.ended_s = self._clock()
        return answer

    async def _ask(self, request: bytes) -> Answer:
        while True:
            connection = self._take_idle()
            is_new = connection is None
            if connection is None:
                connection = await self._connect()
            try:
                answer = await connection.ask(request)
            except BaseException:
                connection.close()
                raise
            if connection.is_open:
                self._idle.append(connection)
            elif not is_new and not connection.has_reply:
                continue  # the server gave up the idle connection at the moment it was used
            return answer

    def close(self) -> None:
        """Close every idle connection."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    def _take_idle(self) -> Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                return connection
        return None

    async def _connect(self) -> Connection:
        target = self._target
        transport, connection = await asyncio.get_running_loop().create_connection(
            lambda: Connection(self._clock, self._max_body_bytes), self._host, target.port, ssl=self._tls,
            server_hostname=target.host if self._tls else None,
        )  # fmt: skip
        peer = transport.get_extra_info("peername")
        self._host = peer[0] if peer else self._host
        return connection


def tls_context(target: Target) -> ssl.SSLContext | None:
    """For a target with TLS."""
    if not target.is_tls:
        return None
    context = ssl.create_default_context()
    if not target.checks_certificate:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def request_bytes(target: Target, body: bytes | None, path: str | None = None) -> bytes:
    """A whole HTTP request: POST of `body`, or GET of `path` when there is none."""
    host = f"[{target.host}]" if ":" in target.host else target.host
    lines = [f"{'GET' if body is None else 'POST'} {path or target.path} HTTP/1.1", f"host: {host}:{target.port}"]
    lines += [f"{name}: {value}" for name, value in target.headers.items()]
    if body is not None:
        lines += ["content-type: application/json", f"content-length: {len(body)}"]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1") + (body or b"")
