"""LastWords: the newest log lines of a process, and its stacks when it dies, where another process can still read them.

Made by the process that watches: a file that is unlinked once both have opened it. The child writes its log into it as
well, and Python's fault handler the stacks of all threads: on a fatal signal, and when the watcher asks.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import signal
from pathlib import Path

MAX_BYTES = 128 << 10
"""Beyond twice that, the older half goes."""
ASK = signal.SIGUSR2


class LastWords:
    """The watcher's end."""

    def __init__(self, path: str | Path) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)

    @property
    def num_bytes(self) -> int:
        """Written so far."""
        return os.fstat(self._fd).st_size if self._fd >= 0 else 0

    def read(self) -> str:
        """What was written last; empty after `close`."""
        if self._fd < 0:
            return ""
        size = os.fstat(self._fd).st_size
        return os.pread(self._fd, 2 * MAX_BYTES, max(0, size - 2 * MAX_BYTES)).decode(errors="replace")

    def close(self) -> None:
        """Give the file back; harmless when repeated."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1


class _Handler(logging.Handler):
    """Writes records behind what is there, of which it keeps the newer half when it becomes long."""

    def __init__(self, fd: int, formatter: logging.Formatter | None) -> None:
        super().__init__()
        self._fd = fd
        self.setFormatter(formatter)

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record; what cannot be written is left out."""
        with contextlib.suppress(OSError, ValueError, TypeError):
            size = os.fstat(self._fd).st_size
            if size > 2 * MAX_BYTES:
                kept = os.pread(self._fd, MAX_BYTES, size - MAX_BYTES)
                os.ftruncate(self._fd, 0)
                os.write(self._fd, kept[kept.find(b"\n") + 1 :])
            os.write(self._fd, f"{self.format(record)}\n".encode(errors="replace"))


def keep_last_words(path: str | Path) -> None:
    """In the child, once its log is configured: write log and stacks to the watcher's file, too."""
    fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
    logger = logging.getLogger("quire")
    formatter = logger.handlers[0].formatter if logger.handlers else None
    logger.addHandler(_Handler(fd, formatter))
    faulthandler.enable(fd, all_threads=True)
    faulthandler.register(ASK, fd, all_threads=True)
