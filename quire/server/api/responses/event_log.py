"""The events of responses that are sent as streams: of one (`EventLog`), and of those that ended (`EndedLogs`).

A log holds bytes, and nothing of the work that wrote them. Owned by `background`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from quire.server.api.responses.store import Key, TenantUsage
from quire.server.http.keep_alive import COMMENT

EVENT_BYTES = 64
"""What an event takes besides its text."""


class EventLog:
    """The events of one response, in order.

    Attributes:
        is_over: nothing more comes.
        num_bytes: that it takes.
    """

    def __init__(self) -> None:
        self.is_over = False
        self.num_bytes = 0
        self._events: list[bytes] = []
        self._news = asyncio.Event()

    def note(self, event: bytes) -> None:
        """Add an event; followers are woken by `tell`."""
        self._events.append(event)
        self.num_bytes += len(event) + EVENT_BYTES

    def tell(self) -> None:
        """Wake up who follows."""
        news, self._news = self._news, asyncio.Event()
        news.set()

    def end(self) -> None:
        """Nothing more comes."""
        self.is_over = True
        self.tell()

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


class EndedLogs:
    """Logs of responses that have ended; when they are too many bytes, the tenant that has most loses its oldest.

    Args:
        max_bytes: of all of them.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._logs: dict[str, dict[str, EventLog]] = {}  # by tenant, oldest first
        self._shares = TenantUsage()

    def get(self, key: Key) -> EventLog | None:
        """The log of a response; None = it is not kept."""
        return self._logs.get(key[0], {}).get(key[1])

    def put(self, key: Key, log: EventLog) -> None:
        """Keep a log."""
        self.forget(key)
        self._logs.setdefault(key[0], {})[key[1]] = log
        self._shares.add(key[0], log.num_bytes)
        while self._shares.num_bytes > self._max_bytes:
            largest = self._shares.largest()
            self.forget((largest, next(iter(self._logs[largest]))))

    def forget(self, key: Key) -> None:
        """Keep a log no longer; nothing when there is none."""
        log = self._logs.get(key[0], {}).pop(key[1], None)
        if log is None:
            return
        self._shares.remove(key[0], log.num_bytes)
        if not self._logs[key[0]]:
            del self._logs[key[0]]
