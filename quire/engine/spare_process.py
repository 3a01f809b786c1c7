"""SpareProcess: a child with the libraries of an engine core imported, which waits for its setup. SpareProcesses: one.

Made where models are switched, so that a load does not wait for a process and its imports; `core_launcher` makes an
engine core of it. Owns the child until it is taken, and the thread that the child ends with.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading

from quire.logger import get_logger
from quire.utils.children import Child, start_module

CORE_MODULE = "quire.engine.core_proc"
PRELOAD = "preload"

logger = get_logger(__name__)


class SpareProcess:
    """A child process that is to become an engine core.

    The kernel kills the child with the thread that started it, so that thread stays until `release`.
    """

    def __init__(self) -> None:
        self._child: Child | None = None
        self._ready_fd, self._child_fd = os.pipe()
        self._is_started, self._is_over = threading.Event(), threading.Event()
        threading.Thread(target=self._keep, name="spare engine core", daemon=True).start()

    def take(self) -> tuple[Child, int] | None:
        """The child and the descriptor on which it answers, the caller's from now on; None when it has ended.

        `release` follows when the child has ended.
        """
        self._is_started.wait()
        child = self._child
        if child is None or child.poll() is not None:
            self.close()
            return None
        return child, self._ready_fd

    def release(self) -> None:
        """The child has ended: the thread may, too. Harmless when repeated."""
        self._is_over.set()

    def close(self) -> None:
        """End a child that was not taken; it has nothing to tidy up."""
        self._is_started.wait()
        child = self._child
        if child is not None and child.stdin is not None:
            child.kill()
            child.wait()
            child.stdin.close()
        with contextlib.suppress(OSError):
            os.close(self._ready_fd)
        self.release()

    def _keep(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self._child = start_module(
                CORE_MODULE, str(self._child_fd), PRELOAD, stdin=subprocess.PIPE, pass_fds=(self._child_fd,)
            )
        except OSError as error:
            logger.warning("no spare process could be started: %s", error)
        finally:
            os.close(self._child_fd)
            self._is_started.set()
        self._is_over.wait()


class SpareProcesses:
    """Keeps one spare process ready; used by several threads."""

    def __init__(self) -> None:
        self._spare: SpareProcess | None = None
        self._lock = threading.Lock()
        self._is_closed = False

    def prepare(self) -> None:
        """Start a process, unless there is one."""
        with self._lock:
            if self._spare is None and not self._is_closed:
                self._spare = SpareProcess()

    def take(self) -> SpareProcess | None:
        """The process that is there, the caller's from now on; None = there is none."""
        with self._lock:
            spare, self._spare = self._spare, None
            return spare

    def close(self) -> None:
        """End it; none is started any more."""
        with self._lock:
            self._is_closed = True
        spare = self.take()
        if spare is not None:
            spare.close()
