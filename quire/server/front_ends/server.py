"""The HTTP server of one front end: as the one of a server that is alone, but the owner accepts and drains.

Made by `front_ends.process`. Among the connections that it is given are those of other front ends, which forward what
is about responses that it makes.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from typing import Any

import uvicorn

from quire.engine.output_stream import noop
from quire.errors import ConfigError
from quire.logger import get_logger
from quire.server.front_ends.ledger import Ledger, SlotWord
from quire.server.front_ends.peers import Arrivals
from quire.server.front_ends.setup import MAX_MARK_BYTES, OVER, PEER
from quire.server.http.connection import StreamingProtocol, protocol_factory
from quire.server.http.peers import FORWARDED
from quire.server.launcher import DrainingServer, Serving

TAKEN_AT_ONCE = 64
TICK_S = 0.25

logger = get_logger(__name__)


class GivenConnection(StreamingProtocol):
    """A connection that the owner accepted.

    Attributes:
        on_lost: called once, when it is gone.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.on_lost: Callable[[], None] = noop

    def connection_lost(self, exc: Exception | None) -> None:
        """As `StreamingProtocol`."""
        super().connection_lost(exc)
        on_lost, self.on_lost = self.on_lost, noop
        on_lost()


class FrontEndServer(DrainingServer):
    """Serves the connections that come through a socket.

    Args:
        config: uvicorn's.
        state: what it serves.
        shutdown_timeout_s: seconds for running answers.
        connections: where the owner hands over connections.
        ledger: shared with other front ends.
        arrivals: get the connections that this front end has asked for.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        state: Serving,
        shutdown_timeout_s: float,
        connections: socket.socket,
        ledger: Ledger,
        arrivals: Arrivals,
    ) -> None:
        super().__init__(config, state, shutdown_timeout_s)
        self._given = connections
        self._given.setblocking(False)
        self._ledger, self._arrivals = ledger, arrivals
        self._openings: set[asyncio.Task[None]] = set()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Take connections, then call `on_started`.

        Raises:
            ConfigError: the application cannot be started.
        """
        await self.lifespan.startup()
        if self.lifespan.should_exit:
            raise ConfigError("the application could not be started; see the log above")
        loop = asyncio.get_running_loop()
        self.servers = []
        loop.add_reader(self._given.fileno(), self._take)
        self._watching.append(loop.create_task(self._tick()))
        self.started = True
        self._watch()
        self.on_started("")

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """As `DrainingServer`."""
        asyncio.get_running_loop().remove_reader(self._given.fileno())
        self._given.close()
        await super().shutdown(sockets)

    def end_at_once(self) -> None:
        """As a second signal."""
        self.force_exit = self.should_exit = True

    async def _tick(self) -> None:
        """Show that the event loop runs."""
        while True:
            self._ledger.add(SlotWord.NUM_TICKS, 1)
            await asyncio.sleep(TICK_S)

    def _connection(self, state: dict[str, Any]) -> GivenConnection:
        made = self.config.http_protocol_class(
            config=self.config, server_state=self.server_state, app_state={**self.lifespan.state, **state},
            _loop=asyncio.get_running_loop(),
        )  # type: ignore[call-arg]  # fmt: skip
        assert isinstance(made, GivenConnection), "the process gives uvicorn this protocol"
        return made

    def _take(self) -> None:
        """Take the connections that the owner has accepted."""
        for _ in range(TAKEN_AT_ONCE):
            try:
                mark, fds, _, _ = socket.recv_fds(self._given, MAX_MARK_BYTES, 1)
            except (BlockingIOError, InterruptedError):
                return
            if not mark:  # the owner is gone, and this process with it
                asyncio.get_running_loop().remove_reader(self._given.fileno())
                return
            for fd in fds:
                self._sort(mark, socket.socket(fileno=fd))

    def _sort(self, mark: bytes, connection: socket.socket) -> None:
        if mark.isdigit():
            self._arrivals.put(int(mark), connection)
            return
        opening = self._open_peer(connection) if mark == PEER else self._open(connection, mark == OVER)
        task = asyncio.get_running_loop().create_task(opening)
        self._openings.add(task)
        task.add_done_callback(self._openings.discard)

    async def _open_peer(self, peer: socket.socket) -> None:
        """Serve another front end."""
        peer.setblocking(False)
        with contextlib.suppress(OSError):  # it has ended
            await asyncio.get_running_loop().connect_accepted_socket(lambda: self._connection({FORWARDED: True}), peer)

    async def _open(self, client: socket.socket, is_over: bool) -> None:
        """Serve a connection; one beyond the limit in place of an idle one, or not at all."""
        client.setblocking(False)
        if client.family != socket.AF_UNIX:
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection = self._connection({})
        if is_over:
            connection.max_connections = 0
        connection.on_lost = lambda: self._ledger.add(SlotWord.NUM_CLOSED, 1)
        try:
            await asyncio.get_running_loop().connect_accepted_socket(lambda: connection, client, ssl=self.config.ssl)
        except OSError as error:  # it was no TLS, or the client has left
            logger.debug("a connection was not opened: %s", error)
            client.close()
            on_lost, connection.on_lost = connection.on_lost, noop
            on_lost()


def given_protocol(limits: Any) -> Any:
    """What uvicorn calls for each connection of a front end."""
    return protocol_factory(limits, GivenConnection)
