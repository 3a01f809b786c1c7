"""Followers: processes that follow expensive grammars, each for one answer. Owned by the grammar manager.

What a follower is asked, a thread waits for; its answer sits out the steps meanwhile. A process may take so much CPU
time and memory in all; beyond, the kernel ends it, and with it the answer.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import msgspec
import numpy as np

from quire.logger import get_logger
from quire.structured_output.compile.messages import WorkerSetup, read_message, write_message
from quire.structured_output.follow_messages import FollowReply, FollowStart, FollowStep
from quire.utils.children import Child, start_module
from quire.utils.fair_queue import FairQueue

NUM_AT_ONCE = 2
"""Followers that are asked at a time; of the others each waits for its tenant's turn."""
MAX_FOLLOWERS = 16
"""Of a server with keys a tenant gets one more only while more are free than it has: at most half, and the next tenant
half of the rest, so that one that comes later finds a place."""
FOLLOW_FACTOR = 10.0
"""CPU time to follow a grammar, times what it may take to compile."""

logger = get_logger(__name__)
OnReply = Callable[[FollowReply], None]


class Follower:
    """Follows the grammar of one answer; asked one thing at a time.

    Attributes:
        line: [bitmask_size] int32, the tokens that may come next.
        is_terminated: the end of the answer was accepted.
    """

    def __init__(self, followers: Followers, tenant: str, on_reply: OnReply) -> None:
        self._followers = followers
        self._on_reply = on_reply
        self.tenant = tenant
        self.line = np.empty(0, dtype=np.int32)
        self.is_terminated = False
        self.connection: socket.socket | None = None
        self.is_closed = False

    def push(self, token_id: int) -> None:
        """Go on by a token; the reply comes from another thread."""
        self._followers.submit(self, FollowStep(token_id))

    def close(self) -> None:
        """The answer is over; what is computed for it ends."""
        self._followers.leave(self)

    def ask(self, message: msgspec.Struct) -> None:
        """Send, and wait for the reply; called by the threads of `Followers`."""
        self.ended(self._ask(message))

    def ended(self, reply: FollowReply) -> None:
        """A reply is there."""
        if reply.line:
            self.line = np.frombuffer(reply.line, dtype=np.int32)
        self.is_terminated = reply.is_terminated
        if not self.is_closed:
            self._on_reply(reply)

    def _ask(self, message: msgspec.Struct) -> FollowReply:
        assert self.connection is not None, "it was begun"
        data = None
        try:
            with self.connection.makefile("rwb") as stream:
                write_message(stream, message)
                data = read_message(stream)
        except (OSError, ValueError):  # it has ended, or was closed meanwhile
            pass
        if data is None:
            return FollowReply(error=self._followers.budget_text)
        return msgspec.msgpack.decode(data, type=FollowReply)


class Followers:
    """Starts followers, and asks them.

    Args:
        setup: the vocabulary and the budget of compiling.
    """

    def __init__(self, setup: WorkerSetup) -> None:
        cpu_s = FOLLOW_FACTOR * setup.cpu_s
        self._setup = msgspec.structs.replace(setup, cpu_s=cpu_s)
        self.budget_text = f"it took more than {cpu_s:g} s of CPU time, or {setup.memory_bytes >> 20} MiB"
        self._threads = ThreadPoolExecutor(NUM_AT_ONCE, "followers")
        self._asked: FairQueue[tuple[Follower, msgspec.Struct]] = FairQueue()
        self._lock = threading.Lock()
        self._unplaced: FairQueue[tuple[Follower, FollowStart]] = FairQueue()
        self._placed: set[Follower] = set()
        self._process: Child | None = None
        self._parent: socket.socket | None = None
        self._is_closed = False

    def begin(self, start: FollowStart, tenant: str, on_reply: OnReply) -> Follower:
        """Follow a grammar; the reply comes from another thread, when there is a place for one more follower."""
        follower = Follower(self, tenant, on_reply)
        with self._lock:
            self._unplaced.put(tenant, (follower, start))
        self._place()
        return follower

    def submit(self, follower: Follower, message: msgspec.Struct) -> None:
        """Ask a follower when its tenant's turn has come."""
        self._asked.put(follower.tenant, (follower, message))
        with suppress(RuntimeError):  # closed
            self._threads.submit(self._ask_next)

    def leave(self, follower: Follower) -> None:
        """A follower is not needed any more; one that waits has its place."""
        with self._lock:
            follower.is_closed = True
            self._placed.discard(follower)
            connection = follower.connection
            if connection is not None:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)  # the computation for it ends by that
                connection.close()
        self._place()

    def close(self) -> None:
        """End all; harmless when repeated."""
        with self._lock:
            self._is_closed = True
            placed, self._placed = self._placed, set()
            process, self._process = self._process, None
        for follower in placed:
            self.leave(follower)
        self._threads.shutdown(wait=False, cancel_futures=True)
        if process is not None:
            assert self._parent is not None
            self._parent.close()
            process.kill()
            process.wait()

    def _place(self) -> None:
        with self._lock:
            while not self._is_closed and (waiting := self._unplaced.pop_from(self._has_place)) is not None:
                follower, start = waiting
                if not follower.is_closed:
                    self._placed.add(follower)
                    self.submit(follower, start)

    def _has_place(self, tenant: str) -> bool:
        num_free = MAX_FOLLOWERS - len(self._placed)
        num_held = sum(one.tenant == tenant for one in self._placed) if tenant else 0
        return num_held < num_free

    def _ask_next(self) -> None:
        follower, message = self._asked.pop()
        try:
            if isinstance(message, FollowStart):
                self._connect(follower, message)
            if not follower.is_closed:
                follower.ask(message)
        except Exception as error:  # its waiter must get a reply
            logger.exception("a grammar cannot be advanced")
            if not follower.is_closed:
                follower.ended(FollowReply(error=f"{type(error).__name__}: {error}"))

    def _connect(self, follower: Follower, start: FollowStart) -> None:
        """Have a process forked for it, at the other end of a connection of its own."""
        ours, theirs = socket.socketpair()
        with self._lock, theirs:
            if self._is_closed or follower.is_closed:
                ours.close()
                follower.is_closed = True
                return
            follower.connection = ours
            assert start.spec is not None, "any text is not expensive"
            socket.send_fds(self._started(), [start.spec.backend.encode()], [theirs.fileno()])

    def _started(self) -> socket.socket:
        if self._process is None or self._process.poll() is not None or self._parent is None:
            if self._parent is not None:
                self._parent.close()
            self._parent, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                self._process = start_module("quire.structured_output.follow_worker", stdin=theirs.fileno())
            self._parent.send(msgspec.msgpack.encode(self._setup))
        return self._parent
