"""FrontEndsOwner: the process of a server with several front ends that has no connection itself.

Run by `quire serve --api-server-count N`. Owns the engine cores (through their supervisors), the address, the stored
responses and the front-end processes. One that dies is replaced; its requests are aborted, and what it held of limits
is free. The first SIGTERM or SIGINT drains all front ends, a second one ends them at once.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from functools import partial
from socket import socket, socketpair
from typing import Any

from quire.config import QuireConfig
from quire.config.server import ServerConfig
from quire.engine.data_parallel.replicas import supervise
from quire.engine.front_ends.hub import FrontEndHub
from quire.engine.front_ends.messages import (
    BeginDrain,
    FrontEndFailed,
    Listening,
    OwnerAnswer,
    OwnerCall,
    Report,
    ToOwner,
    Wake,
)
from quire.engine.mp_factory import EngineStart, with_num_blocks
from quire.engine.process_watch import ProcessWatch
from quire.errors import EngineDeadError, EngineRestartingError, QuireError
from quire.logger import get_logger
from quire.metrics.engine_metrics import EngineMetrics
from quire.metrics.front_end_metrics import FrontEndMetrics
from quire.metrics.replica_metrics import ReplicaMetrics
from quire.server.front_ends.accepting import Acceptor, listening_sockets
from quire.server.front_ends.controls import OwnerControls
from quire.server.front_ends.front_process import FrontEndPlan, FrontEndProcess
from quire.server.front_ends.ledger import Ledger
from quire.server.front_ends.peers import ResponsePlaces
from quire.server.front_ends.reports import Reports
from quire.server.front_ends.setup import CoresReady
from quire.server.front_ends.shelf import OwnedShelf
from quire.server.http.connection_limits import MAX_CONNECTIONS, max_connections
from quire.server.http.service_manager import ServiceManager
from quire.server.launcher import FINAL_EVENTS_S, NOTICE_S, SIGNALS, warn_of_open_address
from quire.utils.phases import PhaseTimer

RETRY_S = 0.25
MAX_RETRY_S = 30.0
STEADY_S = 60.0
"""A front end that has served for so long is restarted at once when it ends."""
LAST_S = 10.0

logger = get_logger(__name__)


class FrontEnds:
    """Front ends that are started while the engine cores are; `cancel` or `run` follows.

    Args:
        start: of the engine cores.
        config: of the server.
    """

    def __init__(self, start: EngineStart, config: ServerConfig) -> None:
        self.start = start
        self.config = config
        self.count = config.http.api_server_count
        self.ledger = Ledger.create(self.count)
        self._plan = FrontEndPlan(start.config, config, start.logits_processors, self.ledger)
        self._serial = 0
        self.on_exit: Callable[[FrontEndProcess, str], None] = lambda process, reason: None
        self.processes = [self.make(slot) for slot in range(self.count)]
        for one in self.processes:
            one.start()

    def make(self, slot: int) -> FrontEndProcess:
        """A front end that is not started."""
        self._serial += 1
        return FrontEndProcess(self._plan, slot, self._serial, lambda process, reason: self.on_exit(process, reason))

    def wait_ready(self, timer: PhaseTimer) -> CoresReady:
        """Wait for the engine cores.

        Raises:
            QuireError: one cannot be built; no process is left.
        """
        cores = (self.start.core, *self.start.others)
        try:
            with timer.phase("waiting for the engine core"):
                num_blocks = min(core.wait_ready().num_blocks for core in cores)
        except BaseException:
            self.cancel()
            raise
        return CoresReady(num_blocks, list(self.start.core.start_phases))

    def cancel(self) -> None:
        """End all processes, which have nothing to tidy up."""
        self.start.cancel()
        self.close()

    def close(self) -> None:
        """End the front ends; harmless when repeated."""
        for one in self.processes:
            one.kill()
        for one in self.processes:
            one.close()


class FrontEndsOwner:
    """Runs them on an event loop.

    Args:
        front_ends: on their way.
        ready: of the cores.
        bound: sockets of the address; None = that is a Unix socket.
        timer: of the start.
    """

    def __init__(self, front_ends: FrontEnds, ready: CoresReady, bound: list[socket] | None, timer: PhaseTimer) -> None:
        start, self._config = front_ends.start, front_ends.config
        config = with_num_blocks(start.config, ready.num_blocks)
        has_replicas = config.parallel.data_parallel_size > 1
        self._front_ends = front_ends
        self._ready = ready
        self._timer = timer
        self._bound = bound
        self._hub = FrontEndHub(config, has_replicas=has_replicas)
        launch = start.launcher()
        launch_replica = launch if start.others else None
        self._hub.supervisor = supervise(self._hub, config, start.core, launch, start.others, launch_replica)
        self._metrics = self._make_metrics(config)
        watch = ProcessWatch(self._hub.core_processes)
        self._metrics.show_processes(lambda: watch.usages, lambda: watch.cores)
        self._counts = FrontEndMetrics(self._metrics.server.registry, front_ends.count, self._num_ready)
        self._reports = Reports(self._metrics.all_series, self._hub.peers, watch)
        self._responses = ResponsePlaces()
        self._shelf = OwnedShelf(self._config.responses)
        OwnerControls(self._hub, config, launch)
        self._hub.own_calls.update({
            "reports": self._reports.answer, "claim_response": self._responses.claim,
            "release_response": self._responses.release, "reach_response": self._reach_response, **self._shelf.calls,
        })  # fmt: skip
        self._retries = dict.fromkeys(range(front_ends.count), 0)
        self._failure: QuireError | None = None
        self._is_draining = False
        self._service_manager = ServiceManager.from_environment()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def errored(self) -> bool:
        """True once the engine is of no further use."""
        return self._hub.dead is not None

    async def run(self, on_listening: Callable[[str], None]) -> None:
        """Serve until a signal has ended it, or the engine has stopped for good.

        Raises:
            QuireError: a front end cannot be started, or the address not listened on.
        """
        self._loop = asyncio.get_running_loop()
        self._is_over = asyncio.Event()
        self._all_ready = asyncio.Event()
        limits = self._config.limits
        most = limits.max_connections or min(MAX_CONNECTIONS, self._front_ends.count * max_connections(limits))
        self._acceptor: Acceptor | None = None
        try:
            self._hub.supervisor.attach()
            self._front_ends.on_exit = self._note_exit
            for one in self._front_ends.processes:
                self._follow(one)
            self._keep(self._hub.keep_status())
            with self._timer.phase("front ends"):
                await self._all_ready.wait()
            if self._failure is not None:
                raise self._failure
            self._acceptor = Acceptor(listening_sockets(self._config.http, self._bound), most)
            self._take_connections()
            for number in SIGNALS:
                self._loop.add_signal_handler(number, self._on_signal)
            self._announce(on_listening)
            await self._is_over.wait()
        finally:
            await self._end()

    async def _end(self) -> None:
        if self._acceptor is not None:
            self._acceptor.close()
        for task in self._tasks:
            task.cancel()
        for process in self._front_ends.processes:
            process.link.close()
        await asyncio.to_thread(self._front_ends.close)
        await self._hub.supervisor.stop()
        self._hub.close()
        await self._shelf.close()

    def _make_metrics(self, config: QuireConfig) -> EngineMetrics:
        name = (list(config.model.served_model_names) or [config.model.model])[0]
        metrics = (ReplicaMetrics if config.parallel.data_parallel_size > 1 else EngineMetrics)(config, name)
        self._hub.step_listeners.append(metrics.record_step)
        return metrics

    def _announce(self, on_listening: Callable[[str], None]) -> None:
        assert self._acceptor is not None, "it listens"
        warn_of_open_address(self._config)
        self._timer.end_phase("listening")
        self._metrics.show_start("server", self._timer.phases)
        self._metrics.show_start("engine_core", self._ready.start_phases)
        address = self._acceptor.address(is_tls=self._config.http.ssl_certfile is not None)
        on_listening(address)
        if self._service_manager is not None:
            self._service_manager.ready(f"listening on {address}")
            self._keep(self._service_manager.run())

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # --- front ends come and go ---

    def _follow(self, process: FrontEndProcess) -> None:
        """Let a front end begin, and read what it sends."""
        if process.is_ended:
            self._on_exit(process, "ended")
            return
        process.link.listen(partial(self._take, process))
        process.begin(self._ready)
        self._hub.add_front_end(process.serial, process.link, process.counts.families)

    def _take(self, process: FrontEndProcess, message: ToOwner) -> None:
        if isinstance(message, Listening):
            process.is_ready = True
            process.ready_s = self._loop.time()
            if self._acceptor is not None:
                logger.info("front end %d serves again (process %s)", process.slot, process.pid)
                self._take_connections()
            elif all(one.is_ready for one in self._front_ends.processes):
                self._all_ready.set()
        elif isinstance(message, FrontEndFailed):
            error = message.error.to_error()
            logger.error("front end %d cannot be started: %s", process.slot, error)
            self._fail_start(error)
            process.kill()
        elif isinstance(message, Wake):
            self._hub.broadcast(Wake(), but=process.serial)
        elif isinstance(message, Report):
            self._reports.take(process.serial, message)
        else:
            self._hub.take(process.serial, message)

    def _num_ready(self) -> int:
        return sum(one.is_ready for one in self._front_ends.processes)

    def _take_connections(self) -> None:
        if self._acceptor is not None:
            self._acceptor.set_front_ends(one for one in self._front_ends.processes if one.is_ready)

    def _fail_start(self, error: QuireError) -> None:
        if self._acceptor is None:
            self._failure = self._failure or error
            self._all_ready.set()

    def _note_exit(self, process: FrontEndProcess, reason: str) -> None:
        """Called in the front end's thread."""
        with contextlib.suppress(RuntimeError):  # the loop has ended, and all with it
            self._loop.call_soon_threadsafe(self._on_exit, process, reason)

    def _on_exit(self, process: FrontEndProcess, reason: str) -> None:
        """A front end has ended: what it held is free, and another takes its place."""
        if process.is_noted or self._is_over.is_set():
            return
        process.is_noted = True
        was_ready, process.is_ready = process.is_ready, False
        num_aborted = self._hub.remove_front_end(process.serial)
        self._reports.remove(process.serial, process.counts.families())
        self._responses.remove_slot(process.slot)
        self._front_ends.ledger.clear_slot(process.slot)
        self._take_connections()
        process.close()
        self._hub.broadcast(Wake())
        if self._is_draining or self.errored:
            if not self._hub.peers:
                self._is_over.set()
            return
        if self._acceptor is None:
            self._fail_start(EngineDeadError(f"front end {process.slot} {reason} while it started"))
            return
        logger.error(
            "front end %d (process %s) %s: %d sequences of its requests are aborted; it is restarted",
            process.slot, process.pid, reason, num_aborted,
        )  # fmt: skip
        is_steady = was_ready and self._loop.time() - process.ready_s >= STEADY_S
        self._retries[process.slot] = 0 if is_steady else self._retries[process.slot] + 1
        num_in_a_row = self._retries[process.slot]
        wait_s = min(MAX_RETRY_S, RETRY_S * 2**num_in_a_row) if num_in_a_row > 1 else 0.0
        self._loop.call_later(wait_s, self._replace, process.slot)

    def _replace(self, slot: int) -> None:
        if self._is_draining or self._is_over.is_set():
            return
        process = self._front_ends.processes[slot] = self._front_ends.make(slot)
        process.start()
        self._counts.note_restart()
        self._follow(process)

    async def _reach_response(self, serial: int, call: OwnerCall) -> OwnerAnswer:
        """A connection to the front end that makes a response, unless it is the one that asks."""
        slot = self._responses.made_at(call.key)
        if slot is None or slot == call.number:
            return OwnerAnswer(call.call_id)
        maker, asker = self._front_ends.processes[slot], self._front_ends.processes[call.number]
        one, other = socketpair()
        with one, other:
            if not (maker.give_peer(one) and asker.give_peer(other, call.call_id)):
                raise EngineRestartingError("the process that makes this response cannot be reached")
        return OwnerAnswer(call.call_id, number=call.call_id)

    # --- the end ---

    def _on_signal(self) -> None:
        if self._is_draining:
            logger.warning("second signal: exiting immediately")
            self._hub.broadcast(BeginDrain(is_last=True))
            self._loop.call_later(LAST_S, self._is_over.set)
            return
        self._is_draining = True
        longest_s = self._config.http.shutdown_timeout + NOTICE_S + 4 * FINAL_EVENTS_S
        logger.info("draining: %d front ends, %d sequences in flight", len(self._hub.peers), self._hub.num_requests)
        if self._service_manager is not None:
            self._service_manager.draining(f"draining {self._hub.num_requests} sequences", longest_s)
        self._hub.broadcast(BeginDrain())
        self._loop.call_later(longest_s + LAST_S, self._is_over.set)
        if not self._hub.peers:
            self._is_over.set()
