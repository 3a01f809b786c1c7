"""FrontEndProcess: one front end, to the owner: started, watched, ended. Owns the child, its link and its connections.

A thread of its own starts the child and stays until the child has ended, as for an engine core. A front end whose event
loop stands still, or that holds the ledger's lock while it is stopped, is killed: the others wait for that lock.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from quire.config import QuireConfig
from quire.config.server import ServerConfig
from quire.engine.core_launcher import process_use
from quire.engine.front_ends.link import FrontEndLink
from quire.engine.front_ends.messages import ToOwner
from quire.engine.hang_detector import HangDetector, Sample
from quire.logger import get_logger
from quire.metrics.count_page import CountPage
from quire.server.front_ends.ledger import Ledger, SlotWord
from quire.server.front_ends.setup import CLIENT, OVER, PEER, CoresReady, FrontEndSetup
from quire.utils.children import Child, describe_exit, start_module, wait_for_end, write_block

MODULE = "quire.server.front_ends.process"
POLL_S = 0.25
LOCK_TIMEOUT_S = 5.0
"""For which a process may hold the ledger's lock, which takes microseconds."""

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class FrontEndPlan:
    """What all front ends of a server are started with; attributes as `FrontEndSetup`."""

    config: QuireConfig
    server: ServerConfig
    logits_processors: list[str]
    ledger: Ledger


class FrontEndProcess:
    """A child process with a front end.

    Args:
        plan: what it has in common with the others.
        slot: its place among them.
        serial: its own number.
        on_exit: called in another thread, with it and how it ended, once the child has ended.

    Attributes:
        link: to the child.
        counts: what it counts.
        is_ready: it takes connections.
        ready_s: since when, on the event loop's clock.
        num_given: connections that it was given.
        is_ended: it has ended, or is about to.
        is_noted: the owner has drawn the consequences.
    """

    def __init__(
        self, plan: FrontEndPlan, slot: int, serial: int, on_exit: Callable[[FrontEndProcess, str], None]
    ) -> None:
        self.slot, self.serial = slot, serial
        own_link, self._child_link = socket.socketpair()
        self._child_link_fd = self._child_link.fileno()  # the same in the child
        self.link: FrontEndLink[ToOwner] = FrontEndLink(own_link, ToOwner, "front end")
        self.counts = CountPage.create()
        self.is_ready = False
        self.ready_s = 0.0
        self.num_given = 0
        self._plan = plan
        self._on_exit = on_exit
        self._own_end, self._child_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._own_end.setblocking(False)
        self._child_end_fd = self._child_end.fileno()  # the same in the child
        self._child: Child | None = None
        self.is_ended = self.is_noted = False
        self._hang: str | None = None
        self._begin: CoresReady | None = None
        self._may_begin = threading.Event()
        self._detector = HangDetector(plan.config.supervision.hang_timeout_s)
        self._lock_held: tuple[int, float] | None = None
        self._thread = threading.Thread(target=self._keep, name=f"front end {slot}", daemon=True)

    def start(self) -> None:
        """Start the child, which prepares itself; returns at once."""
        self._thread.start()

    def begin(self, ready: CoresReady) -> None:
        """The cores are ready: the front end may serve."""
        self._begin = ready
        self._may_begin.set()

    @property
    def pid(self) -> int | None:
        """The child's process id."""
        return None if self._child is None else self._child.pid

    @property
    def num_connections(self) -> int:
        """That it was given and that are open."""
        return self.num_given - self._plan.ledger.of_slot(SlotWord.NUM_CLOSED, self.slot)

    def give(self, connection: socket.socket, *, is_over: bool) -> bool:
        """Hand over a connection, one beyond the limit with `is_over`; False = it takes none now."""
        is_given = self._send(OVER if is_over else CLIENT, connection)
        self.num_given += is_given
        return is_given

    def give_peer(self, connection: socket.socket, call_id: int | None = None) -> bool:
        """Hand over an end of a connection to another front end: the one it has asked for by a call, or the other."""
        return self._send(PEER if call_id is None else b"%d" % call_id, connection)

    def _send(self, mark: bytes, connection: socket.socket) -> bool:
        try:
            socket.send_fds(self._own_end, [mark], [connection.fileno()])
        except OSError:  # it has ended, or so many wait that it does not get to take them
            return False
        return True

    def kill(self) -> None:
        """End the child now, whatever it does."""
        self.is_ended = True
        self._may_begin.set()
        if self._child is not None and self._child.poll() is None:
            self._child.kill()

    def close(self) -> None:
        """After the child's end: give everything back. Harmless when repeated."""
        self.kill()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()
        self.link.close()
        self.counts.close()
        self._own_end.close()

    # --- the child's thread ---

    def _keep(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # inherited: a Ctrl-C is for this process
        try:
            self._child = self._spawn()
        except OSError as error:
            self._on_exit(self, f"cannot be started: {error}")
            return
        finally:
            self._child_end.close()
            self._child_link.close()
        if self.is_ended:
            self._child.kill()
        self._send_setup()
        code = self._watch()
        self.is_ended = True
        self._on_exit(self, self._hang or describe_exit(code))

    def _spawn(self) -> Child:
        environment = {name: value for name, value in os.environ.items() if name != "NOTIFY_SOCKET"}
        fds = (self._child_end_fd, self._child_link_fd, self._plan.ledger.fd, self.counts.fd)
        return start_module(
            MODULE, stdin=subprocess.PIPE, pass_fds=fds, env=environment,
            uses_current_directory=bool(self._plan.logits_processors),
        )  # fmt: skip

    def _send_setup(self) -> None:
        assert self._child is not None
        plan = self._plan
        setup = FrontEndSetup(
            config=plan.config, server=plan.server, logits_processors=plan.logits_processors, slot=self.slot,
            serial=self.serial, link_fd=self._child_link_fd, connections_fd=self._child_end_fd,
            ledger_fd=plan.ledger.fd, counts_fd=self.counts.fd, parent_pid=os.getpid(),
        )  # fmt: skip
        write_block(self._child, msgspec.msgpack.encode(setup))
        while not self._may_begin.wait(POLL_S):
            if self._child.poll() is not None:
                return
        if self._begin is not None:  # it was not killed
            write_block(self._child, msgspec.msgpack.encode(self._begin))

    def _watch(self) -> int:
        """Wait for the child's end; its exit code."""
        assert self._child is not None
        last = time.monotonic()
        while True:
            code = wait_for_end(self._child, POLL_S)
            if code is not None:
                return code
            now = time.monotonic()
            self._look(now, now - last)
            last = now

    def _look(self, now: float, elapsed_s: float) -> None:
        """Kill a child that stands still."""
        holder = self._plan.ledger.lock.holder()
        if holder is not None:  # a process that does not advance now may wait for it
            since = self._lock_held[1] if self._lock_held is not None and self._lock_held[0] == holder else now
            self._lock_held = holder, since
            if holder == self.pid and now - since >= LOCK_TIMEOUT_S:
                self._end(f"hang: it has held the lock of all front ends for {now - since:.1f} s")
            return
        self._lock_held = None
        state, cpu_s = process_use(self.pid)
        sample = Sample(
            progress=(self._plan.ledger.of_slot(SlotWord.NUM_TICKS, self.slot),), should_advance=self.is_ready,
            cpu_s=cpu_s, is_stopped=state == "T", is_waiting=state in ("D", "R"),
        )  # fmt: skip
        hang = self._detector.observe(sample, elapsed_s)
        if hang is not None:
            self._end(f"hang: {hang}")

    def _end(self, reason: str) -> None:
        if self._hang is None and self._child is not None:
            self._hang = reason
            logger.error("killing front end %d (process %s): %s", self.slot, self.pid, reason)
            self._child.kill()
