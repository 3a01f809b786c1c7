"""Acceptor: accepts connections and hands each to the front end that has the fewest. Owns what listens.

The owner accepts, so that nothing is lost when a front end ends: what has not been accepted waits in the backlog, and
what comes goes to the others. `SO_REUSEPORT` would let the kernel choose, by chance and front ends that are gone, too.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterable
from pathlib import Path

from quire.config.server import HttpConfig
from quire.engine.output_stream import noop
from quire.logger import get_logger
from quire.server.front_ends.front_process import FrontEndProcess
from quire.server.http.listening import cannot_listen, claim_socket_path, url_of

BACKLOG = 2048
ACCEPTED_AT_ONCE = 64
PAUSE_S = 0.5

logger = get_logger(__name__)


def listening_sockets(http: HttpConfig, bound: list[socket.socket] | None) -> list[socket.socket]:
    """Sockets that listen, made of `bound` ones, or of the path of a Unix socket.

    Raises:
        ConfigError: the address cannot be listened on.
    """
    if bound is None:
        assert http.uds is not None, "there are bound sockets for every other address"
        claim_socket_path(http.uds)
        Path(http.uds).unlink()
        bound = [socket.socket(socket.AF_UNIX)]
        before = os.umask(0o177)
        try:
            bound[0].bind(http.uds)
        finally:
            os.umask(before)
    for one in bound:
        try:
            one.listen(BACKLOG)
        except OSError as error:
            raise cannot_listen(http.host, http.port, error.strerror or str(error)) from None
        one.setblocking(False)
    return bound


class Acceptor:
    """Listens on the running event loop once it is started.

    Args:
        sockets: that listen.
        max_connections: of all front ends together.
    """

    def __init__(self, sockets: list[socket.socket], max_connections: int) -> None:
        self._sockets = sockets
        self._max_connections = max_connections
        self._front_ends: list[FrontEndProcess] = []
        self._is_listening = False
        self._is_closed = False
        self._turn = 0

    def set_front_ends(self, front_ends: Iterable[FrontEndProcess]) -> None:
        """The front ends that take connections now; while there are none, connections wait."""
        self._front_ends = list(front_ends)
        self._listen(is_wanted=bool(self._front_ends))

    def address(self, *, is_tls: bool) -> str:
        """Where it listens, as a URL or the path of its socket."""
        return url_of(self._sockets[0].getsockname(), is_tls=is_tls)

    def close(self) -> None:
        """Accept nothing more; harmless when repeated."""
        self._listen(is_wanted=False)
        self._is_closed = True
        for one in self._sockets:
            if one.family == socket.AF_UNIX and one.fileno() >= 0:
                Path(one.getsockname()).unlink(missing_ok=True)
            one.close()

    def _listen(self, *, is_wanted: bool) -> None:
        if is_wanted == self._is_listening or self._is_closed:
            return
        self._is_listening = is_wanted
        loop = asyncio.get_running_loop()
        for one in self._sockets:
            if is_wanted:
                loop.add_reader(one.fileno(), self._accept, one)
            else:
                loop.remove_reader(one.fileno())

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            if not self._is_listening:
                return
            try:
                connection, _ = listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # no more files: those that are open close at some time
                logger.error("connections cannot be accepted for now: %s", error)
                self._pause()
                return
            with connection:
                if not self._hand(connection):
                    self._pause()
                    return

    def _hand(self, connection: socket.socket) -> bool:
        """Give a connection to the front end with the fewest, in turn among those; False = none takes it."""
        count = len(self._front_ends)
        self._turn += 1
        first = [self._front_ends[(self._turn + step) % count] for step in range(count)]
        numbers = {one.slot: one.num_connections for one in first}
        is_over = sum(numbers.values()) >= self._max_connections
        by_load = sorted(first, key=lambda one: numbers[one.slot])
        return any(one.give(connection, is_over=is_over) for one in by_load)

    def _pause(self) -> None:
        """Accept nothing for a moment."""
        self._listen(is_wanted=False)
        asyncio.get_running_loop().call_later(
            PAUSE_S, lambda: self._listen(is_wanted=bool(self._front_ends)) if not self._is_closed else noop()
        )
