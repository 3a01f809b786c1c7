"""Responses that are made while nobody waits: started, followed, cancelled.

Used by the routes. Owns the tasks of those that run, and the events of those that are told as streams, of ended ones as
many as fit `MAX_ENDED_BYTES`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from quire.engine.output_stream import nothing
from quire.entrypoints.openai.errors import api_error_of
from quire.entrypoints.openai.keep_alive import COMMENT
from quire.entrypoints.openai.running import Run, cancelled
from quire.entrypoints.responses.form import CANCELLED, CUT_OFF, ENDED, FAILED, QUEUED, with_status
from quire.entrypoints.responses.store import Key
from quire.entrypoints.responses.writer import ResponseWriter

MAX_ENDED_BYTES = 32 << 20

Save = Callable[[dict[str, Any]], Awaitable[None]]


class LiveResponse:
    """A response in the making.

    Args:
        key: its tenant and id.
        run: started.
        writer: has written nothing yet.
        save: keeps the response as it is.
        tells_events: they can be followed.

    Attributes:
        response: the object; what the answer has so far is in it.
        is_over: nothing more comes.
        on_over: called then.
    """

    def __init__(self, key: Key, run: Run, writer: ResponseWriter, save: Save, *, tells_events: bool) -> None:
        self.key = key
        self.tells_events = tells_events
        self.is_over = False
        self.num_bytes = 0
        self._run = run
        self._writer = writer
        self._save = save
        self._events: list[bytes] = []
        self._news = asyncio.Event()
        self._ended: dict[str, Any] | None = None
        self._queued: dict[str, Any] | None = None
        self._task: asyncio.Task[None] | None = None
        self.on_over: Callable[[], None] = nothing
        writer.on_event = self._note

    @property
    def response(self) -> dict[str, Any]:
        """The response as it is."""
        return self._ended or self._queued or self._writer.response

    async def start(self) -> None:
        """Keep it as queued, and go on alone."""
        self._writer.begin(QUEUED)
        self._queued = {**self._writer.response, "status": QUEUED}
        await self._save(self._queued)
        self._task = asyncio.get_running_loop().create_task(self._make())

    async def end(self, status: str, error: dict[str, str] | None = None) -> None:
        """End it with `status`, unless it has ended; returns when that is kept."""
        assert self._task is not None, "it was started"
        await cancelled(self._task)
        if not self.is_over:
            response = self.response
            await self._finish(response if response["status"] in ENDED else with_status(response, status, error))

    async def events(self, after: int, silence_s: float) -> AsyncIterator[bytes]:
        """Its events from number `after` + 1 on; a comment when there was none for `silence_s` (0 = never)."""
        first = after + 1
        while True:
            news, is_over = self._news, self.is_over
            if first < len(self._events):
                yield b"".join(self._events[first:])
                first = len(self._events)
            elif is_over:
                return
            else:
                try:
                    await asyncio.wait_for(news.wait(), silence_s or None)
                except (TimeoutError, asyncio.TimeoutError):
                    yield COMMENT

    async def _make(self) -> None:
        """Take what the engine says until the answer is complete."""
        run, writer = self._run, self._writer
        try:
            while not run.is_over:
                item = await run.next()
                if self._queued is not None:
                    self._queued = None
                    writer.in_progress()
                writer.events(*item)
                self._tell()
            writer.end()
        except Exception as error:  # the response says so
            self._queued = None
            writer.error(api_error_of(error))
        finally:
            run.close()
        await self._finish(writer.response)

    async def _finish(self, response: dict[str, Any]) -> None:
        """Keep the response, then let its followers know."""
        if not self._writer.is_ended:
            self._writer.failed(response)
        self._ended = response
        await self._save(response)
        self.is_over = True
        self._tell()
        self.on_over()

    def _note(self, event: bytes) -> None:
        if self.tells_events:
            self._events.append(event)
            self.num_bytes += len(event)

    def _tell(self) -> None:
        """Wake up who follows."""
        news, self._news = self._news, asyncio.Event()
        news.set()


class Background:
    """The responses of one server that are made in the background."""

    def __init__(self) -> None:
        self._live: dict[Key, LiveResponse] = {}
        self._ended: dict[Key, LiveResponse] = {}  # oldest first

    def get(self, key: Key) -> LiveResponse | None:
        """A response that runs; None = there is no such."""
        return self._live.get(key)

    def told(self, key: Key) -> LiveResponse | None:
        """A response whose events are known; None = there is no such."""
        live = self._live.get(key) or self._ended.get(key)
        return live if live is not None and live.tells_events else None

    async def start(self, live: LiveResponse) -> None:
        """Have it made."""
        self._live[live.key] = live
        live.on_over = lambda: self._note_end(live)
        await live.start()

    async def cancel(self, live: LiveResponse) -> dict[str, Any]:
        """End it; the response as it is then."""
        await live.end(CANCELLED)
        return live.response

    def forget(self, key: Key) -> None:
        """Its events are told no more."""
        self._ended.pop(key, None)

    async def close(self) -> None:
        """End all of them; each is kept as failed."""
        for live in list(self._live.values()):
            await live.end(FAILED, CUT_OFF)

    def _note_end(self, live: LiveResponse) -> None:
        self._live.pop(live.key, None)
        if not live.tells_events:
            return
        self._ended[live.key] = live
        while sum(one.num_bytes for one in self._ended.values()) > MAX_ENDED_BYTES:
            del self._ended[next(iter(self._ended))]
