"""LinkReader: hands the messages of a link to a callback on an event loop. Owns the loop's interest in the link."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

from quire.engine.core_link import LinkEnd

MAX_MESSAGES_AT_ONCE = 32

T = TypeVar("T")


class LinkReader(Generic[T]):
    """Reads on the loop it is made on, until it is closed.

    Args:
        link: open as long as the reader is.
        on_message: called on the loop with each message.
    """

    def __init__(self, link: LinkEnd[T], on_message: Callable[[T], None]) -> None:
        self._link = link
        self._on_message = on_message
        self._loop = asyncio.get_running_loop()
        self._is_closed = False
        self._fd = link.fd
        self._loop.add_reader(self._fd, self._receive)
        self._loop.call_soon(self._receive)  # what came before is not announced again

    def close(self) -> None:
        """Read nothing more; harmless when repeated."""
        if not self._is_closed:
            self._is_closed = True
            if not self._loop.is_closed():
                self._loop.remove_reader(self._fd)

    def _receive(self) -> None:
        """Take what has come; the rest in the loop's next round, so that others have their turn."""
        for _ in range(MAX_MESSAGES_AT_ONCE):
            if self._is_closed:
                return
            message = self._link.receive()
            if message is None:
                return
            self._on_message(message)
        self._loop.call_soon(self._receive)
