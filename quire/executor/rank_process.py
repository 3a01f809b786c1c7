"""RankProcess: one rank other than 0, started, watched and ended. Made by `multiproc`; owns the child.

A thread of its own starts the child and stays until the child has ended: the kernel kills the child with that thread.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Callable
from typing import Protocol

import msgspec

from quire.errors import EngineDeadError
from quire.executor.rank_proc import RankAnswer, RankSetup
from quire.utils.children import Child, describe_exit, start_module, write_block

RANK_MODULE = "quire.executor.rank_proc"
CLOSE_TIMEOUT_S = 5.0


class Rank(Protocol):
    """A rank other than 0, wherever it runs."""

    @property
    def pid(self) -> int | None:
        """Of its process; None = that is of another machine, or has not been started."""

    def wait_ready(self) -> None:
        """Wait until its part of the model is loaded. Raises the QuireError that keeps it from being."""

    def close(self) -> None:
        """End it; harmless when repeated."""


class RankProcess:
    """A child process with a worker.

    Args:
        on_exit: called with the rank and the reason, from the thread of the child, when it ends without being asked.
    """

    def __init__(self, setup: RankSetup, on_exit: Callable[[int, str], None]) -> None:
        self._setup = setup
        self._on_exit = on_exit
        self._child: Child | None = None
        self._answer: RankAnswer | EngineDeadError | None = None
        self._answered = threading.Event()
        self._is_closing = False
        self._thread = threading.Thread(target=self._keep, name=f"rank {setup.rank}", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int | None:
        """Of the child."""
        return None if self._child is None else self._child.pid

    def wait_ready(self) -> None:
        """Wait until its part of the model is loaded.

        Raises:
            QuireError: it cannot be.
        """
        self._answered.wait()
        if isinstance(self._answer, EngineDeadError):
            raise self._answer
        assert self._answer is not None, "set before the event"
        if self._answer.error is not None:
            raise self._answer.error.to_error()

    def close(self) -> None:
        """End the child; harmless when repeated."""
        self._is_closing = True
        child = self._child
        if child is not None and child.stdin is not None:
            with contextlib.suppress(OSError):
                child.stdin.close()
        self._thread.join(CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            if self._child is not None:
                self._child.kill()
            self._thread.join()

    def _keep(self) -> None:
        # The child inherits it: a Ctrl-C is for this process, and would be a traceback while the child imports.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        ready_fd, child_fd = os.pipe()
        stage_fd, experts = self._setup.stage_fd, self._setup.experts
        regions = [self._setup.fd] if stage_fd is None else [self._setup.fd, stage_fd]
        if experts is not None:
            regions += experts.fds
        try:
            self._child = start_module(
                RANK_MODULE,
                str(child_fd),
                stdin=subprocess.PIPE,
                pass_fds=(child_fd, *regions, *self._setup.cache_fds),
            )
        except OSError as error:
            os.close(ready_fd)
            self._give(EngineDeadError(f"the process of rank {self._setup.rank} cannot be started: {error}"))
            return
        finally:
            os.close(child_fd)
        with os.fdopen(ready_fd, "rb") as answer:
            write_block(self._child, msgspec.msgpack.encode(self._setup))
            data = answer.read()
        self._give(self._read(self._child, data))
        code = self._child.wait()
        if not self._is_closing:
            self._on_exit(self._setup.rank, f"rank {self._setup.rank} (process {self.pid}) {describe_exit(code)}")

    def _read(self, child: Child, data: bytes) -> RankAnswer | EngineDeadError:
        try:
            return msgspec.msgpack.decode(data, type=RankAnswer)
        except msgspec.DecodeError:
            child.kill()
            return EngineDeadError(
                f"the process of rank {self._setup.rank} exited during startup: it {describe_exit(child.wait())}",
                hint="see its messages above; after signal 9 the machine may have run out of memory",
            )

    def _give(self, answer: RankAnswer | EngineDeadError) -> None:
        self._answer = answer
        self._answered.set()
