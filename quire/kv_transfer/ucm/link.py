"""SideProcess: a program in another Python that answers one call at a time, and may be dead, hang or come back.

Used by the UCM connector, on its thread. Owns the process and its pipes; what it cannot answer is an OSError, and it is
started again with a later call.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from subprocess import DEVNULL
from typing import Any

from quire.config.kv_transfer import FIELD
from quire.errors import ConfigError
from quire.utils.children import Child, start_file

PROGRAM = Path(__file__).with_name("side.py")
RESTART_S = 2.0
"""Least seconds between two starts."""
START_S = 120.0
"""Most seconds that it takes to start: it imports a large package."""
LINE_BYTES = 1 << 16


class _EndedError(OSError):
    """The program is not there any longer."""


class SideProcess:
    """The program `side.py`.

    Args:
        python: the interpreter, by its path or by a name on PATH.
        options: its first line.
        memory_fd: memory that it maps; -1 = none.
        timeout_s: seconds that an answer may take; after that it is ended.
        log: a file for what it and UCM print; None = nowhere.

    Attributes:
        num_starts: how often it was started.
    """

    def __init__(
        self, python: str, options: Mapping[str, Any], memory_fd: int, timeout_s: float, log: str | None
    ) -> None:
        self._python, self._options, self._memory_fd = python, options, memory_fd
        self._timeout_s, self._log = timeout_s, log
        self._process: Child | None = None
        self._pipes: tuple[int, int] = (-1, -1)  # requests, answers
        self._started_at = float("-inf")
        self._unread = b""
        self._logs = tempfile.TemporaryDirectory(prefix="quire-ucm-")  # UCM's own, else in the current directory
        self._is_closed = False
        self._ending = threading.Lock()
        self.num_starts = 0

    def start(self) -> None:
        """Start it, unless it runs.

        Raises:
            ConfigError: there is no such interpreter.
            OSError: it did not start, or says why it cannot; or it was started a moment ago.
        """
        if self._process is not None and self._process.poll() is None:
            return
        self._end()
        if self._is_closed or time.monotonic() < self._started_at + RESTART_S:
            raise OSError("the program does not run")
        python = shutil.which(self._python)
        if python is None:
            raise ConfigError(
                f"{FIELD}: side_python: there is no {self._python!r}",
                hint="give the path of a Python 3.12 that has UCM", field=FIELD,
            )  # fmt: skip
        self._started_at = time.monotonic()
        self._spawn(python)
        self.num_starts += 1
        answer = self._exchange(self._options, START_S)
        if "error" in answer:
            self._end()
            raise OSError(str(answer["error"]))

    def _spawn(self, python: str) -> None:
        request_end, requests = os.pipe()
        answers, answer_end = os.pipe()
        self._pipes, self._unread = (requests, answers), b""
        given = [request_end, answer_end, *([self._memory_fd] if self._memory_fd >= 0 else [])]
        arguments = [
            "--requests", str(request_end), "--answers", str(answer_end), "--memory", str(self._memory_fd), "--logs",
            self._logs.name,
        ]  # fmt: skip
        try:
            with open(self._log or os.devnull, "ab") as log:
                self._process = start_file(
                    python, PROGRAM, *arguments, stdin=DEVNULL, stdout=log, stderr=log, pass_fds=given
                )
        except BaseException:
            os.close(requests)
            os.close(answers)
            raise
        finally:
            os.close(request_end)
            os.close(answer_end)

    def ask(self, call: str, **arguments: Any) -> dict[str, Any]:
        """The answer to a call.

        Raises:
            OSError: it did not answer, or says that it failed.
        """
        message = {"call": call, **arguments}
        try:
            self.start()
            answer = self._exchange(message, self._timeout_s)
        except ConfigError as error:
            raise OSError(str(error)) from error
        except _EndedError:  # perhaps long ago
            self.start()
            answer = self._exchange(message, self._timeout_s)
        if "error" in answer:
            raise OSError(str(answer["error"]))
        return answer

    def _exchange(self, message: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        requests, answers = self._pipes
        deadline = time.monotonic() + timeout_s
        try:
            _write_all(requests, json.dumps(message).encode() + b"\n")
            while b"\n" not in self._unread:
                ready, _, _ = select.select([answers], [], [], max(0.0, deadline - time.monotonic()))
                if not ready:
                    raise OSError(f"the program did not answer within {timeout_s:g} s")
                data = os.read(answers, LINE_BYTES)
                if not data:
                    raise BrokenPipeError
                self._unread += data
            line, _, self._unread = self._unread.partition(b"\n")
            answer = json.loads(line)
            if not isinstance(answer, dict):
                raise OSError("the program answered something else")
            return answer
        except BrokenPipeError:
            self._end()
            raise _EndedError("the program ended") from None
        except (OSError, ValueError) as error:
            self._end()
            raise OSError(str(error)) from error

    def _end(self) -> None:
        with self._ending:  # the engine may end while the thread waits for an answer
            process, self._process = self._process, None
        if process is not None:
            pipes = self._pipes
            process.kill()
            process.wait()
            for pipe in pipes:
                os.close(pipe)

    def close(self) -> None:
        """End it for good; it loses nothing, as it answers when something is done."""
        self._is_closed = True
        self._end()
        self._logs.cleanup()


def _write_all(pipe: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(pipe, view) :]
