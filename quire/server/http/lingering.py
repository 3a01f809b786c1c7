"""Closing a connection on which the client still sends, so that it can read its answer.

Unread bytes make the kernel answer with a reset, which takes the answer from the client with it. Called by
the connections; `Lingering` owns a transport from then on.
"""

from __future__ import annotations

import asyncio

LINGER_S = 5.0
LINGER_BYTES = 64 << 20


class Lingering(asyncio.Protocol):
    """Drops what still comes, until the client closes or was given long enough.

    Args:
        transport: its last answer is written.
        owner: learns when the connection is lost.
    """

    def __init__(self, transport: asyncio.Transport, owner: asyncio.Protocol, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._owner = owner
        self._num_left = LINGER_BYTES
        self._timer = loop.call_later(LINGER_S, transport.abort)

    def data_received(self, data: bytes) -> None:
        """More of what is not wanted."""
        self._num_left -= len(data)
        if self._num_left < 0:
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """As `asyncio.Protocol.connection_lost`."""
        self._timer.cancel()
        self._owner.connection_lost(exc)


def close_lingering(transport: asyncio.Transport, owner: asyncio.Protocol, loop: asyncio.AbstractEventLoop) -> None:
    """Close `transport` once its client has had the time to read what was written."""
    transport.set_protocol(Lingering(transport, owner, loop))
    if transport.can_write_eof():
        transport.write_eof()
    transport.resume_reading()
