"""Background responses: started, followed, cancelled, deleted.

Used by the routes. Owns the tasks of those that run, the ids that are taken by requests under way, and the events of
responses after their end: events (`event_log`), and which of them could not be kept.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from quire.engine.output_stream import noop
from quire.logger import get_logger
from quire.server.api.responses.envelope import CANCELLED, CUT_OFF, ENDED, FAILED, QUEUED, with_status
from quire.server.api.responses.event_log import EndedLogs, EventLog
from quire.server.api.responses.store import Key, ShelfError
from quire.server.api.responses.writer import ResponseWriter
from quire.server.chat.running import Run, cancelled
from quire.server.http.errors import api_error_of
from quire.server.http.peers import Peers

MAX_ENDED_BYTES = 32 << 20
MAX_NOT_KEPT = 10_000

logger = get_logger(__name__)

Save = Callable[[dict[str, Any]], Awaitable[None]]


class LiveResponse:
    """A response in the making.

    Args:
        key: its tenant and id.
        run: started.
        writer: has written nothing yet.
        save: keeps the response as it is; raises `ShelfError`.
        tells_events: they can be followed.

    Attributes:
        response: the object; what the answer has so far is in it.
        log: its events; None = they are not told.
        is_over: nothing more comes.
        is_kept: its end could be kept.
        on_over: called then.
    """

    def __init__(self, key: Key, run: Run, writer: ResponseWriter, save: Save, *, tells_events: bool) -> None:
        self.key = key
        self.log = EventLog() if tells_events else None
        self.is_over = False
        self.is_kept = True
        self.on_over: Callable[[], None] = noop
        self._run = run
        self._writer = writer
        self._save = save
        self._is_deleted = False
        self._ending = asyncio.Lock()
        self._ended: dict[str, Any] | None = None
        self._queued: dict[str, Any] | None = None
        self._task: asyncio.Task[None] | None = None
        if self.log is not None:
            writer.on_event = self.log.note

    @property
    def response(self) -> dict[str, Any]:
        """The response as it is."""
        return self._ended or self._queued or self._writer.response

    async def start(self) -> None:
        """Keep it as queued, and go on alone.

        Raises:
            ShelfError: it cannot be kept; it is not started.
        """
        self._writer.begin(QUEUED)
        self._queued = {**self._writer.response, "status": QUEUED}
        await self._save(self._queued)
        self._task = asyncio.get_running_loop().create_task(self._make())

    async def end(self, status: str, error: dict[str, str] | None = None, *, is_deleted: bool = False) -> None:
        """End it with `status`, unless it has ended; returns when that is kept, or never will be (`is_deleted`)."""
        assert self._task is not None, "it was started"
        self._is_deleted = self._is_deleted or is_deleted
        async with self._ending:
            await cancelled(self._task)
            if not self.is_over:
                response = self.response
                await self._finish(response if response["status"] in ENDED else with_status(response, status, error))

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
                if self.log is not None:
                    self.log.tell()
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
        if not self._is_deleted:
            try:
                await self._save(response)
            except ShelfError as error:
                self.is_kept = False
                logger.error("response %s could not be stored: %s", response["id"], error)
        self.is_over = True
        if self.log is not None:
            self.log.end()
        self.on_over()
        self.on_over = noop


class Claim:
    """A response's id, taken by a request under way until `end`.

    Args:
        claimed: ids that are taken.
        key: which is added to them.
        on_end: called once it is free.
    """

    def __init__(self, claimed: set[Key], key: Key, on_end: Callable[[Key], None]) -> None:
        self._claimed = claimed
        self._on_end = on_end
        self._key = key
        self._is_held = True
        claimed.add(key)

    def end(self) -> None:
        """Give it back, if it is still held here."""
        if self._is_held:
            self._is_held = False
            self._claimed.discard(self._key)
            self._on_end(self._key)

    def hand_on(self) -> Claim:
        """The claim, for the one that ends it in place of this one."""
        self._is_held = False
        return Claim(self._claimed, self._key, self._on_end)


class Background:
    """The responses of one server that are made in the background.

    Attributes:
        others: other front ends on the port, which make responses, too; None = there are none.
    """

    def __init__(self) -> None:
        self.others: Peers | None = None
        self._shared: set[Key] = set()
        self._claimed: set[Key] = set()
        self._live: dict[Key, LiveResponse] = {}
        self._ended = EndedLogs(MAX_ENDED_BYTES)
        self._not_kept: dict[Key, None] = {}  # oldest first

    def get(self, key: Key) -> LiveResponse | None:
        """A response that runs; None = there is no such."""
        return self._live.get(key)

    def has(self, key: Key) -> bool:
        """Whether it runs here, or its events are kept here."""
        return key in self._live or self._ended.get(key) is not None

    def log_of(self, key: Key) -> EventLog | None:
        """The events of a response; None = they are not known."""
        live = self._live.get(key)
        return self._ended.get(key) if live is None else live.log

    def is_taken(self, key: Key) -> bool:
        """Whether a request under way answers as this response."""
        return key in self._claimed or key in self._live

    def claim(self, key: Key) -> Claim:
        """Take an id, which is free, for a request under way."""
        assert not self.is_taken(key), "the caller has looked"
        return Claim(self._claimed, key, self._note_free)

    async def share(self, key: Key) -> bool:
        """Take an id, which is taken here, among all front ends, as long as it is taken here; False = one has it."""
        if self.others is None:
            return True
        if not await self.others.claim(key):
            return False
        self._shared.add(key)
        return True

    def could_be_kept(self, key: Key) -> bool:
        """False for a response that has ended in a way that the store does not have."""
        return key not in self._not_kept

    async def start(self, live: LiveResponse) -> None:
        """Have it made.

        Raises:
            ShelfError: it cannot be kept.
        """
        await self.share(live.key)
        try:
            await live.start()
        except BaseException:
            self._note_free(live.key)
            raise
        self._live[live.key] = live
        live.on_over = lambda: self._note_end(live)

    async def cancel(self, live: LiveResponse) -> dict[str, Any]:
        """End it; the response as it is then."""
        await live.end(CANCELLED)
        return live.response

    async def delete(self, key: Key) -> None:
        """End a response if it runs, and send no more of its events; it is not kept again."""
        live = self._live.get(key)
        if live is not None:
            await live.end(CANCELLED, is_deleted=True)
        self._ended.forget(key)
        self._not_kept.pop(key, None)

    async def close(self) -> None:
        """End all of them; each is kept as failed."""
        for live in list(self._live.values()):
            await live.end(FAILED, CUT_OFF)

    def _note_free(self, key: Key) -> None:
        if key in self._shared and not self.is_taken(key) and self.others is not None:
            self._shared.discard(key)
            self.others.release(key, is_made=self._ended.get(key) is not None)

    def _note_end(self, live: LiveResponse) -> None:
        if self._live.get(live.key) is live:
            del self._live[live.key]
        if live.log is not None:
            self._ended.put(live.key, live.log)
        if not live.is_kept:
            self._not_kept[live.key] = None
            if len(self._not_kept) > MAX_NOT_KEPT:
                del self._not_kept[next(iter(self._not_kept))]
        self._note_free(live.key)
