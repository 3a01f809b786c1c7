"""ServerPause: a server that did not answer is left alone for a while. Used by `redis` and `mooncake_store`."""

from __future__ import annotations

import time

PAUSE_S = 5.0


class ServerPause:
    """Begins with a call that failed; used by one thread."""

    def __init__(self) -> None:
        self._end = 0.0

    def begin(self) -> None:
        """The server did not answer."""
        self._end = time.monotonic() + PAUSE_S

    def check(self) -> None:
        """Raise ConnectionError while it is left alone."""
        if time.monotonic() < self._end:
            raise ConnectionError("the server did not answer a moment ago")
