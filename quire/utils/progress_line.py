"""ProgressLine: one line on a terminal that says how far long work is. Owns what it has written there."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

SHOW_AFTER_S = 1.0
REFRESH_S = 0.1
ERASE = "\r\x1b[K"


class ProgressLine:
    """On stderr, where that is a terminal, and only when the work takes longer than a second.

    Args:
        what: is being done.
        clock: seconds.
    """

    def __init__(self, what: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._what = what
        self._clock = clock
        self._is_enabled = sys.stderr.isatty()
        self._next_s = clock() + SHOW_AFTER_S
        self._is_shown = False

    def show(self, done: int, total: int) -> None:
        """So much of `total` is done."""
        if not self._is_enabled or (now := self._clock()) < self._next_s:
            return
        self._next_s, self._is_shown = now + REFRESH_S, True
        print(f"{ERASE}{self._what} {done / max(total, 1):.0%}", end="", file=sys.stderr, flush=True)

    def end(self) -> None:
        """Remove the line; harmless when repeated."""
        if self._is_shown:
            self._is_shown = False
            print(ERASE, end="", file=sys.stderr, flush=True)
