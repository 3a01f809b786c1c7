"""EventStream: an answer that is sent as it is made (server-sent events).

A token's way: the engine's step puts the output into its stream, which calls `EventStream._write_ready`, which takes it
and writes its event to the connection, all in one call. No task wakes up for it. While the client is slow to read,
nothing is taken, so outputs merge where they are; the connection calls when it can be written to again. The response
ends well-formed whatever happens, and its work ends when the client goes away.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any, Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire.core.outputs import RequestOutput
from quire.server.chat.counts import AnswerCounts
from quire.server.chat.running import Run, cancelled, until_gone
from quire.server.http.connection import BodyWriter, body_writer_of
from quire.server.http.errors import ApiError, api_error_of
from quire.server.http.keep_alive import KeepAlive

DONE = b"data: [DONE]\n\n"
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class EventWriter(Protocol):
    """Writes outputs in the form of one API."""

    @property
    def counts(self) -> AnswerCounts:
        """What was written so far has cost."""

    def whole(self, outputs: list[RequestOutput]) -> bytes:
        """The response to a request that is not a stream, of each prompt's final output."""

    def events(self, prompt_index: int, output: RequestOutput) -> bytes:
        """What `output` adds to the stream; empty when it has nothing to show."""

    def end(self) -> bytes:
        """What comes after the last output."""

    def error(self, error: ApiError) -> bytes:
        """What ends a stream that has failed."""


def error_event(error: ApiError) -> bytes:
    """OpenAI's end of a stream that has failed."""
    return b"data: " + error.content() + b"\n\n" + DONE


class EventStream(Response):
    """A streaming response.

    Args:
        run: started.
        first: what was taken from it already, if anything.
        writer: makes the events.
    """

    def __init__(
        self,
        run: Run,
        first: tuple[int, RequestOutput] | None,
        writer: EventWriter,
        keep_alive: KeepAlive,
    ) -> None:
        super().__init__(media_type="text/event-stream")
        self._run = run
        self._first = first
        self._writer = writer
        self._keep_alive = keep_alive
        self._body: BodyWriter | None = None
        self._end: asyncio.Future[bytes] | None = None
        self.last_write = 0.0 if first is None else time.monotonic()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response; returns when it is complete or the client is gone."""
        try:
            await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
            end = await self._write_until_over(body_writer_of(scope), receive)
        finally:
            self._run.close()
        if end is not None:
            await send({"type": "http.response.body", "body": end, "more_body": False})

    def write_comment(self, comment: bytes) -> None:
        """As `SilentStream.write_comment`."""
        if self._body is not None and self._body.is_writable:
            self._body.write(comment)

    async def _write_until_over(self, body: BodyWriter, receive: Receive) -> bytes | None:
        """Write events as outputs come; returns what ends the response, None when the client is gone."""
        self._body = body
        self._end = asyncio.get_running_loop().create_future()
        self._run.on_ready = body.on_writable = self._write_ready
        self._keep_alive.add(self)
        self._write_ready()
        gone = asyncio.ensure_future(until_gone(receive))
        try:
            awaited: set[asyncio.Future[Any]] = {self._end, gone}
            await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
            return self._end.result() if self._end.done() else None
        finally:
            self._body = None
            self._keep_alive.remove(self)
            await cancelled(gone)

    def _write_ready(self) -> None:
        """Write what has come, if the client takes anything now; if not it stays where it is, merged."""
        body, run = self._body, self._run
        if body is None or not body.is_writable:
            return
        data, end = b"", None
        try:
            item, self._first = self._first or run.take(), None
            while item is not None:
                data += self._writer.events(*item)
                item = run.take()
            if run.is_over:
                end = self._writer.end()
        except Exception as error:  # the status is sent already: the client learns of it inside the stream
            end = self._writer.error(api_error_of(error))
        if data:
            self.last_write = time.monotonic()
            body.write(data)
        if end is not None:
            self._finish(end)

    def _finish(self, end: bytes) -> None:
        """Nothing more is written but `end`."""
        assert self._end is not None, "outputs are written after the future was made"
        self._body = None
        self._run.close()
        self._end.set_result(end)
