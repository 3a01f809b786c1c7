"""KeepAlive: comment lines on streams that have been silent, so that no proxy takes them for dead.

One task for all streams, so that a token costs a stream no timer. Owns that task and the list of streams.
"""

from __future__ import annotations

import asyncio
import time
from typing import Protocol

COMMENT = b": keep-alive\n\n"


class SilentStream(Protocol):
    """A stream that can be written to between two events.

    Attributes:
        last_write: seconds, monotonic clock.
    """

    last_write: float

    def write_comment(self, comment: bytes) -> None:
        """Write `comment`, an SSE comment line, if the client takes anything now."""


class KeepAlive:
    """Watches streams.

    Args:
        interval_s: seconds of silence; 0 = off.
    """

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._streams: set[SilentStream] = set()
        self._task: asyncio.Task[None] | None = None

    def add(self, stream: SilentStream) -> None:
        """Watch a stream until `remove`."""
        self._streams.add(stream)
        if self._interval_s and self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())

    def remove(self, stream: SilentStream) -> None:
        """Stop watching."""
        self._streams.discard(stream)

    def close(self) -> None:
        """End the task."""
        if self._task is not None:
            self._task.cancel()
            self._task = None

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s / 2)
            now = time.monotonic()
            for stream in [one for one in self._streams if now - one.last_write >= self._interval_s]:
                stream.last_write = now
                stream.write_comment(COMMENT)
