"""What a connection may cost: how many there are, how long a client takes to send its request and to read its answer.

`LimitedConnection` is what `connection.StreamingProtocol` stands on; `ConnectionWatch` looks at all of them
once a second, so that no token and no request pays for a timer. Owns when each connection was last seen to advance.
"""

from __future__ import annotations

import asyncio
import resource
import time
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any
from weakref import WeakKeyDictionary

from quire.config.server import LimitsConfig
from quire.logger import get_logger
from quire.server.http.errors import BAD_REQUEST, HEADERS_TOO_LARGE, UNAVAILABLE, ApiError
from quire.server.http.lingering import close_lingering
from quire.server.http.strict_http import Phase, StrictConnection

logger = get_logger(__name__)

SWEEP_S = 1.0
GRACE_S = 2.0  # the route answers a late body with 408 before the connection is given up
IDLE_S = 1.0
MOST_LOOKED_AT = 256
FILES_FOR_OTHERS = 256
MAX_CONNECTIONS = 16384
MOST_REFUSED = 64
PHRASES = {
    BAD_REQUEST.status: b"Bad Request", HEADERS_TOO_LARGE.status: b"Request Header Fields Too Large",
    UNAVAILABLE.status: b"Service Unavailable",
}  # fmt: skip
NOT_HTTP = ApiError(BAD_REQUEST, "the request is not valid HTTP/1.1")
HEAD_TOO_LARGE = ApiError(HEADERS_TOO_LARGE, "the request headers are too large")
TOO_MANY = ApiError(UNAVAILABLE, "too many connections", retry_after_s=1)


class LimitedConnection(StrictConnection):
    """A connection that is refused when there are too many, and answers broken HTTP from the catalogue.

    Attributes:
        max_connections: at once.
        refused: connections beyond that whose client may still be reading its refusal.
    """

    max_connections: int
    refused: set[LimitedConnection]

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take the connection, in place of an idle one where there are too many; or refuse it at once."""
        self._opened_s = time.monotonic()
        self._is_refused = len(self.connections) >= self.max_connections and not self._close_idle()
        if not self._is_refused:
            super().connection_made(transport)
            return
        transport.write(raw_response(TOO_MANY))
        if len(self.refused) >= MOST_REFUSED:
            transport.close()
            return
        self.refused.add(self)
        close_lingering(transport, self, self.loop)

    def _close_idle(self) -> bool:
        """Close the oldest of some connections on which nothing is asked; False when there is none."""
        some = (one for one in islice(self.connections, MOST_LOOKED_AT) if isinstance(one, LimitedConnection))
        idle = [one for one in some if one.is_idle and self._opened_s - one._opened_s >= IDLE_S]
        if not idle:
            return False
        min(idle, key=lambda one: one._opened_s).transport.close()
        return True

    @property
    def is_idle(self) -> bool:
        """True when no request is under way and no byte of one has come."""
        return not self._num_other_bytes and (self.cycle is None or self.cycle.response_complete)

    def data_received(self, data: bytes) -> None:
        """Take in what the client sent."""
        if not self._is_refused:
            super().data_received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone."""
        if self._is_refused:
            self.refused.discard(self)
        else:
            super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP and close; a request whose body broke off is over."""
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()
            if cycle.response_started:
                self.transport.close()
                return
        self.transport.write(raw_response(HEAD_TOO_LARGE if self.is_head_too_large else NOT_HTTP))
        if all(one is cycle or one.response_complete for one in self._open):
            self.phase = Phase.HEAD  # whatever it sends now is not read
            self.close_answered()
        else:
            self.transport.close()


def max_connections(limits: LimitsConfig) -> int:
    """The most connections at once: as set, or what the limit of open files leaves."""
    if limits.max_connections is not None:
        return limits.max_connections
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return min(MAX_CONNECTIONS, max(files // 2, files - FILES_FOR_OTHERS))


def raw_response(error: ApiError) -> bytes:
    """`error` as the bytes of a response after which the connection closes."""
    body = error.content()
    lines = [
        b"HTTP/1.1 %d %s" % (error.kind.status, PHRASES[error.kind.status]), b"content-type: application/json",
        b"content-length: %d" % len(body), b"connection: close",
    ]  # fmt: skip
    if error.retry_after_s is not None:
        lines.append(b"retry-after: %d" % error.retry_after_s)
    return b"\r\n".join([*lines, b"", body])


class ConnectionWatch:
    """Ends connections whose client is too slow.

    Args:
        connections: all there are.
        limits: how slow is too slow.
        clock: seconds.
    """

    def __init__(
        self, connections: Iterable[Any], limits: LimitsConfig, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._connections = connections
        self._limits = limits
        self._clock = clock
        self._seen: WeakKeyDictionary[Any, tuple[tuple[Any, ...], float]] = WeakKeyDictionary()
        self._unsent: WeakKeyDictionary[Any, tuple[int, float]] = WeakKeyDictionary()

    async def run(self) -> None:
        """Sweep until cancelled."""
        while True:
            await asyncio.sleep(SWEEP_S)
            self.sweep()

    def sweep(self) -> None:
        """Look at every connection once."""
        now = self._clock()
        for connection in [one for one in self._connections if isinstance(one, LimitedConnection)]:
            reason = self._sends_too_slowly(connection, now) or self._reads_too_slowly(connection, now)
            if reason is not None:
                logger.debug("connection of %s ended: %s", connection.client, reason)
                connection.transport.abort()

    def _sends_too_slowly(self, connection: LimitedConnection, now: float) -> str | None:
        if connection.phase is Phase.DONE or connection.flow.read_paused:
            self._seen.pop(connection, None)
            return None
        phase = (connection.phase, id(connection.cycle))
        before = self._seen.get(connection)
        if before is None or before[0] != phase:
            self._seen[connection] = (phase, now)
            return None
        if connection.phase is Phase.HEAD:
            return "the headers did not arrive in time" if now - before[1] >= self._limits.head_timeout else None
        return "the body did not arrive in time" if now - before[1] >= self._limits.body_timeout + GRACE_S else None

    def _reads_too_slowly(self, connection: LimitedConnection, now: float) -> str | None:
        size = connection.transport.get_write_buffer_size()
        if not size:
            self._unsent.pop(connection, None)
            return None
        before = self._unsent.get(connection)
        if before is None or before[0] != size:
            self._unsent[connection] = (size, now)
            return None
        return "the client does not read" if now - before[1] >= self._limits.write_timeout else None
