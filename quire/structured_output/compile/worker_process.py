"""WorkerProcess: the engine's end of a compile worker, which is replaced when it ends. Owned by a `WorkerQueue`."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from contextlib import suppress
from typing import IO, TypeVar

import msgspec

from quire.errors import EngineGenerateError, QuireError
from quire.logger import get_logger
from quire.structured_output.compile.errors import BudgetError, LateError, OverTimeError, RefusedError
from quire.structured_output.compile.messages import (
    CompileResult,
    ProbeResult,
    WorkerSetup,
    read_message,
    write_message,
)
from quire.structured_output.compile.worker import OVER_MEMORY, OVER_TIME
from quire.structured_output.interface import GrammarSpec
from quire.utils.children import Child, describe_exit, start_module

WORKER = "quire.structured_output.compile.worker"
logger = get_logger(__name__)

T = TypeVar("T")


class WorkerProcess:
    """One compile worker after another; used by one thread at a time.

    Attributes:
        cpu_s: CPU time of all grammars.
    """

    def __init__(self, setup: WorkerSetup) -> None:
        self._setup = setup
        self._process: Child | None = None
        self._is_closed = self._is_late = False
        self.cpu_s = 0.0

    def run(self, spec: GrammarSpec, deadline_s: float) -> tuple[bytes, bool]:
        """The compiled grammar, and whether it is expensive to follow.

        Args:
            deadline_s: time of `time.monotonic` at which the process is ended, to be replaced by the next grammar.

        Raises:
            RefusedError: the library refuses it.
            LateError: the deadline has passed.
            BudgetError: it takes too much.
            EngineGenerateError: the process that compiles it ended.
        """
        result, is_expensive = self._asked(spec, deadline_s)
        if result.died is not None and self._process is None:
            result, is_expensive = self._asked(spec, deadline_s)  # the worker is replaced: grammars do not end it
        if result.error == OVER_MEMORY:
            raise self._over_memory(spec)
        if result.error == OVER_TIME:
            raise self._over_time(spec)
        if result.died is not None:
            raise self._died(spec, result.died)
        if result.error is not None:
            raise RefusedError(spec.backend, result.error)
        return result.compiled, is_expensive

    def _asked(self, spec: GrammarSpec, deadline_s: float) -> tuple[CompileResult, bool]:
        """The worker's answer, or how it ended, and whether the grammar is expensive to follow."""
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise LateError(f"the grammar ({spec.kind}) was not compiled in time")
        process = self._started()
        assert process.stdin is not None and process.stdout is not None, "both were asked for"
        self._is_late = False
        timer = threading.Timer(left_s, self._end_late, (process,))
        timer.daemon = True
        timer.start()
        try:
            write_message(process.stdin, spec)
            result = _read(process.stdout, CompileResult)
            is_last = result is None or result.error is not None or result.died is not None
            probed = None if is_last else _read(process.stdout, ProbeResult)
        except OSError:
            result, probed, is_last = None, None, True
        finally:
            timer.cancel()
        if result is not None and (is_last or probed is not None):
            self.cpu_s += result.cpu_s if probed is None else probed.cpu_s
            return result, probed is not None and probed.is_expensive
        self.dispose()
        if self._is_closed:
            raise BudgetError("the engine is shut down")
        if self._is_late:
            raise LateError(f"the grammar ({spec.kind}) was not compiled in time")
        return CompileResult(died=describe_exit(process.returncode)), False

    def kill(self) -> None:
        """End the process, and start none again."""
        self._is_closed = True
        if self._process is not None:
            _kill_group(self._process)

    def dispose(self) -> None:
        """Wait for the process that was killed."""
        process, self._process = self._process, None
        if process is None:
            return
        _kill_group(process)
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with suppress(OSError):  # what was not sent any more
                    stream.close()

    def _started(self) -> Child:
        if self._is_closed:
            raise BudgetError("the engine is shut down")
        if self._process is None or self._process.poll() is not None:
            self.dispose()
            self._process = start_module(WORKER, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
            assert self._process.stdin is not None, "it was asked for"
            write_message(self._process.stdin, self._setup)
        return self._process

    def _end_late(self, process: Child) -> None:
        self._is_late = True
        _kill_group(process)

    def _died(self, spec: GrammarSpec, how: str) -> QuireError:
        """The process did not answer, and no limit is known to have ended it."""
        logger.error("the process that compiled a grammar (%s) for %s %s", spec.kind, spec.backend, how)
        return EngineGenerateError(
            f"the grammar ({spec.kind}) could not be compiled: the {spec.backend} process {how}",
            hint="see the server's log; try again, or simplify the grammar",
        )

    def _over_time(self, spec: GrammarSpec) -> QuireError:
        return OverTimeError(
            f"the grammar ({spec.kind}) takes more than {self._setup.cpu_s:g} s to compile",
            hint="use a simpler grammar, or start the engine with a larger structured_outputs_compile_timeout",
            field=f"structured_outputs.{spec.kind}",
        )

    def _over_memory(self, spec: GrammarSpec) -> QuireError:
        return BudgetError(
            f"the grammar ({spec.kind}) takes more than {self._setup.memory_bytes >> 20} MiB to compile",
            hint="use a simpler grammar, or start the engine with a larger structured_outputs_compile_memory",
            field=f"structured_outputs.{spec.kind}",
        )


def _kill_group(process: Child) -> None:
    """End a worker and its child, which would keep the pipe open that is read."""
    if process.returncode is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _read(stream: IO[bytes], kind: type[T]) -> T | None:
    data = read_message(stream)
    return None if data is None else msgspec.msgpack.decode(data, type=kind)
