"""EventStream: an answer that is sent as it is made (server-sent events).

One write a step and stream; ends well-formed whatever happens, and ends its work when the client goes away.
"""

from __future__ import annotations

import asyncio
import time
from typing import Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire.core.outputs import RequestOutput
from quire.entrypoints.openai.errors import api_error_of
from quire.entrypoints.openai.keep_alive import KeepAlive
from quire.entrypoints.openai.running import Outputs, cancelled, until_gone

DONE = b"data: [DONE]\n\n"
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class EventWriter(Protocol):
    """Writes outputs in the form of one API."""

    def events(self, prompt_index: int, output: RequestOutput) -> bytes:
        """What `output` adds to the stream; empty when it has nothing to show."""

    def end(self) -> bytes:
        """What comes after the last output."""


class EventStream(Response):
    """A streaming response.

    Args:
        outputs: the rest of them.
        first: the first one, under way or done.
        writer: makes the events.
    """

    def __init__(
        self,
        outputs: Outputs,
        first: asyncio.Task[tuple[int, RequestOutput]],
        writer: EventWriter,
        keep_alive: KeepAlive,
    ) -> None:
        super().__init__(media_type="text/event-stream")
        self._outputs = outputs
        self._first = first
        self._writer = writer
        self._keep_alive = keep_alive
        self._send: Send | None = None
        self._is_over = False
        self.last_write = time.monotonic() if first.done() else 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response; returns when it is complete or the client is gone."""
        self._send = scope.get("state", {}).get("server_send", send)
        writing = asyncio.ensure_future(self._write(send, self._send))
        gone = asyncio.ensure_future(until_gone(receive))
        try:
            await asyncio.wait({writing, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await cancelled(gone)
            await cancelled(writing)
            await cancelled(self._first)
            await self._outputs.aclose()
        if not writing.cancelled():
            writing.result()

    async def write_comment(self, comment: bytes) -> None:
        """As `SilentStream.write_comment`."""
        if self._send is not None and not self._is_over:
            await self._send({"type": "http.response.body", "body": comment, "more_body": True})

    async def _write(self, start: Send, send: Send) -> None:
        await start({"type": "http.response.start", "status": 200, "headers": HEADERS})
        self._keep_alive.add(self)
        try:
            tail = await self._write_outputs(send)
        except Exception as error:  # the status is sent already: the client learns of it inside the stream
            tail = b"data: " + api_error_of(error).content() + b"\n\n" + DONE
        finally:
            self._is_over = True
            self._keep_alive.remove(self)
        await send({"type": "http.response.body", "body": tail, "more_body": False})

    async def _write_outputs(self, send: Send) -> bytes:
        events, monotonic = self._writer.events, time.monotonic
        body = events(*await self._first)
        if body:
            await send({"type": "http.response.body", "body": body, "more_body": True})
        async for prompt_index, output in self._outputs:
            body = events(prompt_index, output)
            if body:
                self.last_write = monotonic()
                await send({"type": "http.response.body", "body": body, "more_body": True})
        return self._writer.end()
