"""What child processes of ours do about their life: read what the parent sends first, and end when it does."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

from quire.errors import EngineDeadError

PR_SET_PDEATHSIG = 1


def read_block(fd: int) -> bytes:
    """Bytes preceded by their number (8 bytes, little endian).

    Raises:
        EngineDeadError: the parent has exited before it sent them.
    """
    size = int.from_bytes(_read_exactly(fd, 8), "little")
    return _read_exactly(fd, size)


def _read_exactly(fd: int, size: int) -> bytes:
    parts = b""
    while len(parts) < size:
        part = os.read(fd, size - len(parts))
        if not part:
            raise EngineDeadError("the parent process has exited")
        parts += part
    return parts


def die_with_parent(parent_pid: int) -> None:
    """Let the kernel kill this process with its parent, even while it is stopped or stuck."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(0)


def ignore_terminal_signals() -> None:
    """Sent to a whole process group they are for the parent, which may drain."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
