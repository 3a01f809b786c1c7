"""Lane: a thread that takes items from a queue, of which others can ask since when it is at one block."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Generic, TypeVar

from quire.logger import get_logger

logger = get_logger(__name__)

Item = TypeVar("Item")
Note = Callable[[], None]
"""Called before each part of an item that may hang."""


class Lane(Generic[Item]):
    """Does `work` with each item of `items`, until it finds None there.

    Args:
        fail: is given an item with which `work` raised.
        niceness: where the system has it by thread: how far others go before it when processors are short.
    """

    def __init__(
        self,
        name: str,
        items: SimpleQueue[Item | None],
        work: Callable[[Item, Note], None],
        fail: Callable[[Item], None],
        clock: Callable[[], float] = time.monotonic,
        *,
        niceness: int = 0,
    ) -> None:
        self._niceness = niceness
        self._items, self._work, self._fail, self._clock = items, work, fail, clock
        self._busy_since: float | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def busy_s(self, now: float) -> float:
        """Seconds for which it has been at the same part of an item; 0 = it is at none."""
        since = self._busy_since
        return 0.0 if since is None else now - since

    @property
    def is_alive(self) -> bool:
        """Whether it was started and has not ended."""
        return self._thread.is_alive()

    def join(self, seconds: float) -> None:
        """Wait until it has ended, for so long at most."""
        if self._thread.is_alive():
            self._thread.join(seconds)

    def _run(self) -> None:
        if self._niceness and sys.platform == "linux":
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), self._niceness)
        while (item := self._items.get()) is not None:
            try:
                self._work(item, self._note)
            except Exception:  # an error of ours must not end the thread, on which requests wait
                logger.exception("a job of a KV offload thread failed")
                self._fail(item)
            finally:
                self._busy_since = None

    def _note(self) -> None:
        self._busy_since = self._clock()
