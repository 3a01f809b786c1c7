"""CompilePool: grammars made off the engine's loop, each within a budget of CPU time and memory.

A grammar is tried in the quick lane, which gives up after `QUICK_CPU_S`; what takes longer waits for the slow lane,
where it gets what the machine leaves idle. So plain grammars never wait for dear ones. In a lane tenants take turns:
whoever floods it delays another's grammar by one of its own.

Owned by the grammar manager. Owns compile workers, each started when it is first needed, and the libraries of this
process, which only read what a worker has compiled.
"""

from __future__ import annotations

import dataclasses
import queue
import subprocess
import threading
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from quire.errors import EngineGenerateError, QuireError, ValidationError
from quire.logger import get_logger
from quire.structured_output.choose import with_fallbacks
from quire.structured_output.compile_messages import CompileResult, WorkerSetup, read_message, write_message
from quire.structured_output.compile_worker import OVER_MEMORY, OVER_TIME
from quire.structured_output.delayed import FreeText
from quire.structured_output.interface import CompiledGrammar, GrammarSpec, StructuredOutputBackend, Vocabulary
from quire.structured_output.registry import make_backend
from quire.structured_output.vocabulary import read_vocabulary
from quire.utils.children import Child, describe_exit, start_module
from quire.utils.fair_queue import FairQueue

WORKER = "quire.structured_output.compile_worker"
QUICK_CPU_S = 0.03
NUM_QUICK_WORKERS, NUM_SLOW_WORKERS = 2, 1
"""At most; a worker is started when all before it are busy."""
# Wall time for a grammar beyond its CPU time: the machine may be busy, and a worker may have to start.
WALL_FACTOR = 20.0
WALL_EXTRA_S = 60.0

logger = get_logger(__name__)


Made = tuple[CompiledGrammar, int]


class BudgetError(ValidationError):
    """A grammar took too much; trying again may go otherwise."""


class OverTimeError(BudgetError):
    """It took too much CPU time."""


class RefusedError(Exception):
    """A library refuses a grammar; `reason` says why."""

    def __init__(self, backend: str, reason: str) -> None:
        super().__init__(f"{backend}: {reason}")
        self.reason = reason


class CompilePool:
    """Compiles grammars.

    Args:
        setup: the vocabulary and the budget.

    Attributes:
        setup: as given.
    """

    def __init__(self, setup: WorkerSetup) -> None:
        self.setup = setup
        quick = msgspec.structs.replace(setup, cpu_s=min(QUICK_CPU_S, setup.cpu_s))
        slow = msgspec.structs.replace(setup, is_background=True)
        self._quick, self._slow = _Lane(quick, NUM_QUICK_WORKERS), _Lane(slow, NUM_SLOW_WORKERS)
        self._workers = [*self._quick.workers, *self._slow.workers]
        self._finalize = weakref.finalize(self, _close, [self._quick, self._slow])
        self._lock = threading.Lock()
        self._vocabulary: Vocabulary | None = None
        self._backends: dict[str, StructuredOutputBackend] = {}

    def compile(self, spec: GrammarSpec, tenant: str = "") -> Future[Made]:
        """A grammar and the bytes it crossed in; the future's exception is a `QuireError` that names the field."""
        made: Future[Made] = Future()
        job = _Job(spec, tenant, made, is_last=self.setup.cpu_s <= QUICK_CPU_S)
        self._quick.submit(tenant, lambda worker: self._make(job, worker))
        return made

    def free_text(self, tenant: str = "") -> Future[Made]:
        """The grammar of any text; made when the vocabulary has been read."""
        made: Future[Made] = Future()
        self._quick.submit(tenant, lambda worker: self._make_free_text(made))
        return made

    @property
    def vocabulary(self) -> Vocabulary:
        """The model's; read when it is first asked for."""
        with self._lock:
            return self._read_vocabulary()

    def close(self) -> None:
        """End the workers; harmless when repeated."""
        self._finalize()

    def _make_free_text(self, made: Future[Made]) -> None:
        if not made.set_running_or_notify_cancel():
            return
        try:
            with self._lock:
                self._read_vocabulary()
            made.set_result((FreeText(), 0))
        except Exception as error:  # whoever waits for it must hear of it
            made.set_exception(error)

    def _make(self, job: _Job, worker: _Worker) -> None:
        """Compile with `worker`; what takes too long, and has not had its last try, goes to the slow lane."""
        spec, made = job.spec, job.made
        if made.cancelled():
            return
        error: QuireError | None = None
        result: Made | None = None
        try:
            result = self._by_first(spec, worker)
        except OverTimeError as over:
            if not job.is_last:
                last = dataclasses.replace(job, is_last=True)
                self._slow.submit(job.tenant, lambda slow: self._make(last, slow))
                return
            error = over
        except QuireError as refused:
            error = refused
        except Exception as unforeseen:  # whoever waits for the grammar must hear of it
            logger.exception("a grammar could not be made")
            error = EngineGenerateError(f"{spec.backend}: {type(unforeseen).__name__}: {unforeseen}")
        if not made.set_running_or_notify_cancel():
            return
        if result is not None:
            made.set_result(result)
        else:
            made.set_exception(error)

    def _by_first(self, spec: GrammarSpec, worker: _Worker) -> Made:
        """The grammar, of the first library that takes it."""
        reasons: dict[str, str] = {}
        for one in with_fallbacks(spec):
            try:
                return self._loaded(one, worker.run(one))
            except RefusedError as error:
                reasons[one.backend] = error.reason
        raise refusal(spec, reasons)

    def _loaded(self, spec: GrammarSpec, compiled: bytes) -> Made:
        try:
            grammar = self._backend(spec.backend).load(spec, compiled)
            grammar.spec = spec
            return grammar, len(compiled)
        except QuireError:
            raise
        except Exception as error:
            logger.exception("a grammar that a worker has compiled cannot be read")
            raise EngineGenerateError(f"{spec.backend}: {type(error).__name__}: {error}") from error

    def _backend(self, name: str) -> StructuredOutputBackend:
        with self._lock:
            if name not in self._backends:
                self._backends[name] = make_backend(name, self._read_vocabulary())
            return self._backends[name]

    def _read_vocabulary(self) -> Vocabulary:
        if self._vocabulary is None:
            setup = self.setup
            self._vocabulary = read_vocabulary(setup.tokenizer_path, setup.vocab_size, setup.eos_token_id)
        return self._vocabulary


@dataclass(frozen=True, slots=True)
class _Job:
    """A grammar to be compiled; `is_last`: what takes too long gets no further try."""

    spec: GrammarSpec
    tenant: str
    made: Future[Made]
    is_last: bool


class _Lane:
    """Workers, a thread for each that waits for its answers, and what waits for them."""

    def __init__(self, setup: WorkerSetup, num_workers: int) -> None:
        self.workers = [_Worker(setup) for _ in range(num_workers)]
        self.threads = ThreadPoolExecutor(num_workers, "grammars")
        self._waiting: FairQueue[Callable[[_Worker], None]] = FairQueue()
        self._idle: queue.LifoQueue[_Worker] = queue.LifoQueue()
        for worker in self.workers:
            self._idle.put(worker)

    def submit(self, tenant: str, work: Callable[[_Worker], None]) -> None:
        """Have `work` done with a worker that is free, when the tenant's turn has come; not when the lane is closed."""
        self._waiting.put(tenant, work)
        with suppress(RuntimeError):  # closed
            self.threads.submit(self._run_next)

    def _run_next(self) -> None:
        worker = self._idle.get()
        try:
            self._waiting.pop()(worker)
        finally:
            self._idle.put(worker)


def _close(lanes: list[_Lane]) -> None:
    for lane in lanes:
        for worker in lane.workers:
            worker.kill()
    for lane in lanes:
        lane.threads.shutdown(wait=threading.current_thread() is threading.main_thread(), cancel_futures=True)
        for worker in lane.workers:
            worker.dispose()


class _Worker:
    """One compile worker after another; used by one thread at a time."""

    def __init__(self, setup: WorkerSetup) -> None:
        self._setup = setup
        self._process: Child | None = None
        self._is_closed = self._is_late = False

    def run(self, spec: GrammarSpec) -> bytes:
        """The compiled grammar.

        Raises:
            RefusedError: the library refuses it.
            BudgetError: it takes too much.
            EngineGenerateError: the process that compiles it ended.
        """
        result = self._asked(spec)
        if result.died is not None and self._process is None:
            result = self._asked(spec)  # the worker is replaced: it is not grammars that end it
        if result.error == OVER_MEMORY:
            raise self._over_memory(spec)
        if result.error == OVER_TIME:
            raise self._over_time(spec)
        if result.died is not None:
            raise self._died(spec, result.died)
        if result.error is not None:
            raise RefusedError(spec.backend, result.error)
        return result.compiled

    def _asked(self, spec: GrammarSpec) -> CompileResult:
        """The worker's answer, or how it ended."""
        process = self._started()
        assert process.stdin is not None and process.stdout is not None, "both were asked for"
        wall_s = WALL_FACTOR * self._setup.cpu_s + WALL_EXTRA_S
        self._is_late = False
        timer = threading.Timer(wall_s, self._end_late, (process,))
        timer.daemon = True
        timer.start()
        try:
            write_message(process.stdin, spec)
            data = read_message(process.stdout)
        except OSError:
            data = None
        finally:
            timer.cancel()
        if data is not None:
            return msgspec.msgpack.decode(data, type=CompileResult)
        self.dispose()
        if self._is_closed:
            raise BudgetError("the engine is shut down")
        if self._is_late:
            raise self._over_time(spec)
        return CompileResult(died=describe_exit(process.returncode))

    def kill(self) -> None:
        """End the process, and start none again."""
        self._is_closed = True
        if self._process is not None:
            self._process.kill()

    def dispose(self) -> None:
        """Wait for the process that was killed."""
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with suppress(OSError):  # what it was not told any more
                    stream.close()

    def _started(self) -> Child:
        if self._is_closed:
            raise BudgetError("the engine is shut down")
        if self._process is None or self._process.poll() is not None:
            self.dispose()
            self._process = start_module(WORKER, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            assert self._process.stdin is not None, "it was asked for"
            write_message(self._process.stdin, self._setup)
        return self._process

    def _end_late(self, process: Child) -> None:
        self._is_late = True
        process.kill()

    def _died(self, spec: GrammarSpec, how: str) -> QuireError:
        """The process did not answer, and no limit is known to have ended it."""
        logger.error("the process that compiled a grammar (%s) for %s %s", spec.kind, spec.backend, how)
        return EngineGenerateError(
            f"the grammar ({spec.kind}) could not be compiled: the process of {spec.backend} {how}",
            hint="the server's log may say why; try again, or simplify the grammar",
        )

    def _over_time(self, spec: GrammarSpec) -> QuireError:
        return OverTimeError(
            f"the grammar ({spec.kind}) takes more than {self._setup.cpu_s:g} s to compile",
            hint="make it simpler, or start the engine with a larger structured_outputs_compile_timeout",
            field=f"structured_outputs.{spec.kind}",
        )

    def _over_memory(self, spec: GrammarSpec) -> QuireError:
        return BudgetError(
            f"the grammar ({spec.kind}) takes more than {self._setup.memory_bytes >> 20} MiB to compile",
            hint="make it simpler, or start the engine with a larger structured_outputs_compile_memory",
            field=f"structured_outputs.{spec.kind}",
        )


def refusal(spec: GrammarSpec, reasons: Mapping[str, str]) -> ValidationError:
    """The error of a grammar that every library refuses which was asked: library -> why."""
    told = "; ".join(f"{backend}: {reason}" for backend, reason in reasons.items())
    return ValidationError(
        f"the grammar ({spec.kind}) is refused by {told}",
        hint="correct it" if spec.may_fall_back else "correct it, or set structured_outputs_backend to auto",
        field=f"structured_outputs.{spec.kind}",
    )
