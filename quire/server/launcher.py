"""Runs the application under uvicorn: sockets, TLS, signals, and the end without a truncated stream.

Called by `quire serve`. The first SIGTERM or SIGINT drains: new work is refused with 503 and Retry-After, running
answers get `shutdown_timeout` seconds, what is left ends with reason abort and a well-formed final event. A second
signal ends at once. A server whose engine has stopped for good ends, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Protocol

import uvicorn

from quire import envs
from quire.config.server import ServerConfig
from quire.engine.protocol import EngineClient
from quire.logger import get_logger
from quire.server.app import Application, make_app
from quire.server.http.connection import StreamingProtocol, protocol_factory
from quire.server.http.connection_limits import ConnectionWatch
from quire.server.http.listening import cannot_listen, claim_socket_path, url_of
from quire.server.http.origins import is_loopback
from quire.server.http.service_manager import ServiceManager
from quire.server.http.tls import CertificateWatch, harden, named_errors, tls_options
from quire.utils.phases import Phases

logger = get_logger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGINT)
POLL_S = 0.05
FINAL_EVENTS_S = 5.0
FINAL_EVENTS_AT_ONCE_S = 1.0
NOTICE_S = 0.2
DEAD_NOTICE_S = 3.0


class Serving(Protocol):
    """What a server must know of what it serves: one engine (`ServerState`), or several models (`ModelPool`)."""

    @property
    def config(self) -> ServerConfig:
        """Of the server."""

    @property
    def errored(self) -> bool:
        """True once it is of no further use."""

    @property
    def is_draining(self) -> bool:
        """True when no new work is taken."""

    @property
    def num_answers(self) -> int:
        """Answers that were admitted and have not ended."""

    @property
    def num_running(self) -> int:
        """Requests in engines."""

    def begin_drain(self) -> None:
        """Take no new work; may be called by a signal handler."""

    async def abort_running(self) -> None:
        """Have every request in engines end with what it has."""

    def show_start(self, server: Phases, core: Phases) -> None:
        """Let /metrics show startup times."""


class DrainingServer(uvicorn.Server):
    """A uvicorn server that ends by draining.

    Args:
        config: uvicorn's.
        state: what it serves.
        shutdown_timeout_s: seconds for running answers.
    """

    def __init__(self, config: uvicorn.Config, state: Serving, shutdown_timeout_s: float) -> None:
        super().__init__(config)
        self._state = state
        self._shutdown_timeout_s = shutdown_timeout_s
        self._draining: asyncio.Task[None] | None = None
        self._dead_since_s = 0.0
        self._watching: list[asyncio.Task[None]] = []
        self._service_manager = ServiceManager.from_environment()
        self.on_started: Callable[[str], None] = lambda address: logger.info("listening on %s", address)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle the process's signals while the server runs; none is raised again afterwards."""
        try:
            originals = {number: signal.signal(number, self.handle_exit) for number in SIGNALS}
        except ValueError:  # not the main thread: the caller calls `begin_drain`
            originals = {}
        try:
            yield
        finally:
            for number, handler in originals.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal came: drain, and when that is under way, end at once."""
        if self._state.is_draining:
            logger.warning("second signal: exiting immediately")
            self.force_exit = self.should_exit = True
        else:
            self._state.begin_drain()  # the loop sees it at its next tick

    def begin_drain(self) -> None:
        """As the first signal; for a program that runs the server in a thread of its own."""
        self._state.begin_drain()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, then call `on_started` with the address.

        Raises:
            ConfigError: the address cannot be listened on.
        """
        if self.config.uds is not None:
            claim_socket_path(self.config.uds)
        try:
            await super().startup(sockets)
        except (SystemExit, OSError) as error:
            reason = error.strerror if isinstance(error, OSError) else ""
            raise cannot_listen(self.config.host, self.config.port, reason or "startup failed") from None
        self._watch()
        self.on_started(self.address())
        if self._service_manager is not None:
            self._service_manager.ready(f"listening on {self.address()}")

    def show_start(self, server: Phases, core: Phases) -> None:
        """Let /metrics show startup times."""
        self._state.show_start(server, core)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close what listens, end what runs: by final events, then by closing its connection."""
        if self._draining is not None:
            self._draining.cancel()
        for server in self.servers:
            server.close()
        if not self.force_exit:
            await asyncio.sleep(NOTICE_S)  # who has just connected gets an answer: that it is to come again
        for connection in list(self.server_state.connections):
            connection.shutdown()  # busy ones close after their answer
        if self.force_exit:
            await self._end_running("exiting immediately", FINAL_EVENTS_AT_ONCE_S)
        await self._wait(lambda: not self.server_state.tasks, 0.0 if self.force_exit else FINAL_EVENTS_S)
        await self._cut_the_rest()
        self.force_exit = False  # nothing is left to wait for, and the application learns of its end
        await super().shutdown(sockets)
        for task in self._watching:
            task.cancel()

    def _watch(self) -> None:
        config, loop = self._state.config, asyncio.get_running_loop()
        connections = ConnectionWatch(self.server_state.connections, config.limits)
        self._watching.append(loop.create_task(connections.run()))
        if config.http.enable_ssl_refresh and self.config.ssl is not None:
            certificates = CertificateWatch(self.config.ssl, config.http)
            self._watching.append(loop.create_task(certificates.run()))
        if self._service_manager is not None:
            self._watching.append(loop.create_task(self._service_manager.run()))

    def address(self) -> str:
        """Where the server listens, as a URL or the path of its socket."""
        return url_of(self.servers[0].sockets[0].getsockname(), is_tls=self.config.is_ssl)

    async def on_tick(self, counter: int) -> bool:
        """Called ten times a second: starts draining once it was asked for, ends when the engine is of no more use."""
        if self._state.errored:
            self._note_dead()
        if self._state.is_draining and self._draining is None:
            self._draining = asyncio.get_running_loop().create_task(self._drain())
        return await super().on_tick(counter)

    def _note_dead(self) -> None:
        """End after a moment in which `/health` says why."""
        if not self._dead_since_s:
            logger.error("the engine has failed permanently: exiting in %g s", DEAD_NOTICE_S)
            self._dead_since_s = time.monotonic()
        elif time.monotonic() - self._dead_since_s > DEAD_NOTICE_S:
            self.should_exit = True

    async def _drain(self) -> None:
        state = self._state
        logger.info(
            "draining: %d requests in flight, rejecting new ones, deadline %g s",
            state.num_answers, self._shutdown_timeout_s,
        )  # fmt: skip
        if self._service_manager is not None:
            longest_s = self._shutdown_timeout_s + NOTICE_S + 4 * FINAL_EVENTS_S
            self._service_manager.draining(f"draining {state.num_answers} requests", longest_s)
        deadline = time.monotonic() + self._shutdown_timeout_s
        await asyncio.sleep(NOTICE_S)  # a load balancer that asks /ready learns of it before the socket closes
        await self._wait(self._is_idle, deadline - time.monotonic())
        await self._end_running("deadline", FINAL_EVENTS_S)
        self.should_exit = True

    async def _end_running(self, why: str, timeout_s: float) -> None:
        """Give every running answer its final event, as far as the engine and the clients take part."""
        num_running = self._state.num_running
        if num_running:
            logger.warning("%s: aborting %d unfinished requests (finish_reason abort)", why, num_running)
            await self._state.abort_running()
            await self._wait(self._is_idle, timeout_s)

    async def _cut_the_rest(self) -> None:
        """Close the connections of answers that are not complete; their requests end as when a client goes away."""
        connections = self.server_state.connections
        cut = [one for one in connections if (cycle := getattr(one, "cycle", None)) and not cycle.response_complete]
        for connection in cut:
            connection.transport.abort()
        if cut:
            logger.warning(
                "%d responses were truncated: their clients did not read, or the engine did not respond", len(cut)
            )
        closing_s = FINAL_EVENTS_AT_ONCE_S if self.force_exit else FINAL_EVENTS_S
        await self._wait(lambda: not self.server_state.tasks and not connections, closing_s)
        for connection in list(connections):  # the last bytes of a complete answer that are not read
            connection.transport.abort()

    def _is_idle(self) -> bool:
        return not self._state.num_answers

    async def _wait(self, condition: Callable[[], bool], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition() and time.monotonic() < deadline:
            await asyncio.sleep(POLL_S)


def make_server(engine: EngineClient, config: ServerConfig, app: Application | None = None) -> DrainingServer:
    """The server of an engine, not yet listening.

    Raises:
        ConfigError: keys or TLS files cannot be read.
    """
    return server_of(app or make_app(engine, config), config)


def server_of(app: Application, config: ServerConfig) -> DrainingServer:
    """The server of an application whose `state.server` is what it serves.

    Raises:
        ConfigError: TLS files cannot be read.
    """
    warn_of_open_address(config)
    options = uvicorn_config(app, config, protocol_factory(config.limits))
    return DrainingServer(options, app.state.server, config.http.shutdown_timeout)


def uvicorn_config(
    app: Application, config: ServerConfig, protocol: Callable[..., StreamingProtocol]
) -> uvicorn.Config:
    """Uvicorn's settings, loaded.

    Args:
        protocol: makes a connection.

    Raises:
        ConfigError: as `server_of`.
    """
    options = uvicorn.Config(
        app,
        host=config.http.host,
        port=config.http.port,
        uds=config.http.uds,
        log_config=None,
        access_log=False,
        server_header=False,
        lifespan="on",
        timeout_keep_alive=config.http.timeout_keep_alive,
        timeout_graceful_shutdown=int(FINAL_EVENTS_S),
        h11_max_incomplete_event_size=config.limits.max_header_bytes,
        ws="none",
        http=protocol,  # type: ignore[arg-type]
        **tls_options(config.http),
    )
    with named_errors():
        options.load()
    if options.ssl is not None:
        harden(options.ssl)
    return options


def warn_of_open_address(config: ServerConfig) -> bool:
    """Log what to do when others can reach a server without keys; returns whether they can."""
    http, api = config.http, config.api
    has_keys = api.api_key or api.api_key_file or envs.api_keys()
    if http.uds is not None or has_keys or is_loopback(http.host):
        return False
    logger.warning(
        "listening on %s without API keys: anyone who can reach this machine can use the model. "
        "Write keys to a file (openssl rand -hex 24 > keys; chmod 600 keys) and start with --api-key-file keys, "
        "or listen on 127.0.0.1 behind a proxy that checks them",
        http.host,
    )
    return True
