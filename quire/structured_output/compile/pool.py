"""CompilePool: grammars made off the engine's loop, each within a budget of CPU time, wall time and memory.

A grammar is tried in the fast queue, which gives up after `FAST_CPU_S`; what takes longer waits in the slow queue,
where it gets what the machine leaves idle. So plain grammars never wait for expensive ones. What is expensive to follow
is found there, too: a worker takes each grammar through a few tokens (`probe`). In a queue tenants take
turns: a flooding tenant delays another's grammar by one of its own. A tenant that has taken more than its share of
the fast queue (`FastBudget`) has the slow one alone.

Owned by the grammar manager. Owns compile workers, each started when it is first needed, and the libraries of this
process, which only read what a worker has compiled.
"""

from __future__ import annotations

import dataclasses
import threading
import time
import weakref
from concurrent.futures import Future
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from quire.errors import EngineGenerateError, QuireError
from quire.logger import get_logger
from quire.structured_output.choose import with_fallbacks
from quire.structured_output.compile.errors import LateError, OverTimeError, RefusedError, refusal
from quire.structured_output.compile.fast_budget import FastBudget
from quire.structured_output.compile.messages import WorkerSetup
from quire.structured_output.compile.worker_process import WorkerProcess
from quire.structured_output.compile.worker_queue import WorkerQueue, close
from quire.structured_output.interface import CompiledGrammar, GrammarSpec, StructuredOutputBackend, Vocabulary
from quire.structured_output.reasoning_gate import FreeText
from quire.structured_output.registry import make_backend
from quire.structured_output.vocabulary import read_vocabulary

FAST_CPU_S = 0.03
NUM_FAST_WORKERS, NUM_SLOW_WORKERS = 2, 1
"""At most; a worker is started when all before it are busy."""
WALL_FACTOR, WALL_EXTRA_S = 20.0, 40.0
"""Wall time of a grammar in both queues, its turns not waited for: a multiple of its CPU time, and the start of workers
with their libraries. Only a machine that is far too busy comes near it.
"""

logger = get_logger(__name__)


class CompileOutcome(NamedTuple):
    """A compiled grammar.

    Attributes:
        num_bytes: that it crossed in.
    """

    grammar: CompiledGrammar
    num_bytes: int


class CompilePool:
    """Compiles grammars.

    Args:
        setup: the vocabulary and the budget of a grammar.
        fast_budget: of each tenant; None when tenants have no shares.

    Attributes:
        setup: as given.
    """

    def __init__(self, setup: WorkerSetup, fast_budget: FastBudget | None = None) -> None:
        self.setup = setup
        self._fast_budget = fast_budget
        fast = msgspec.structs.replace(setup, cpu_s=min(FAST_CPU_S, setup.cpu_s))
        slow = msgspec.structs.replace(setup, is_background=True)
        self._fast, self._slow = WorkerQueue(fast, NUM_FAST_WORKERS), WorkerQueue(slow, NUM_SLOW_WORKERS)
        self._workers = [*self._fast.workers, *self._slow.workers]
        self._finalize = weakref.finalize(self, close, [self._fast, self._slow])
        self._lock = threading.Lock()
        self._vocabulary: Vocabulary | None = None
        self._backends: dict[str, StructuredOutputBackend] = {}

    def compile(self, spec: GrammarSpec, tenant: str = "") -> Future[CompileOutcome]:
        """A grammar and the bytes it crossed in; the future's exception is a `QuireError` that names the field."""
        made: Future[CompileOutcome] = Future()
        job = _Job(spec, tenant, made, is_last=self.setup.cpu_s <= FAST_CPU_S, left_s=self._wall_s)
        self._fast.submit(tenant, lambda worker: self._try_fast(job, worker))
        return made

    def free_text(self, tenant: str = "") -> Future[CompileOutcome]:
        """The grammar of any text; made when the vocabulary has been read."""
        made: Future[CompileOutcome] = Future()
        self._fast.submit(tenant, lambda worker: self._make_free_text(made))
        return made

    @property
    def vocabulary(self) -> Vocabulary:
        """The model's; read when it is first asked for."""
        with self._lock:
            return self._read_vocabulary()

    def close(self) -> None:
        """End the workers; harmless when repeated."""
        self._finalize()

    def _make_free_text(self, made: Future[CompileOutcome]) -> None:
        if not made.set_running_or_notify_cancel():
            return
        try:
            with self._lock:
                self._read_vocabulary()
            made.set_result(CompileOutcome(FreeText(), 0))
        except Exception as error:  # it must reach the caller
            made.set_exception(error)

    def _try_fast(self, job: _Job, worker: WorkerProcess) -> None:
        """Compile with `worker`, when the job's tenant may still take time at ordinary priority."""
        budget = self._fast_budget
        if budget is None:
            return self._make(job, worker)
        if budget.is_spent(job.tenant):
            return self._try_again(job, time.monotonic() + job.left_s)
        before_s = worker.cpu_s
        self._make(job, worker)
        budget.charge(job.tenant, worker.cpu_s - before_s)

    def _make(self, job: _Job, worker: WorkerProcess) -> None:
        """Compile with `worker`; what takes too long, compiled or followed, goes to the slow queue for its last try."""
        spec, made = job.spec, job.made
        if made.cancelled():
            return
        error: QuireError | None = None
        result: CompileOutcome | None = None
        deadline_s = time.monotonic() + job.left_s
        try:
            result = self._by_first(spec, worker, deadline_s)
            if result.grammar.is_expensive and not job.is_last:
                return self._try_again(job, deadline_s)
        except OverTimeError as over:
            if not job.is_last:
                return self._try_again(job, deadline_s)
            error = over
        except LateError:
            error = self._late(spec)
        except QuireError as refused:
            error = refused
        except Exception as unforeseen:  # it must reach the caller
            logger.exception("a grammar could not be compiled")
            error = EngineGenerateError(f"{spec.backend}: {type(unforeseen).__name__}: {unforeseen}")
        if not made.set_running_or_notify_cancel():
            return
        if result is not None:
            made.set_result(result)
        else:
            made.set_exception(error)

    def _try_again(self, job: _Job, deadline_s: float) -> None:
        last = dataclasses.replace(job, is_last=True, left_s=deadline_s - time.monotonic())
        self._slow.submit(job.tenant, lambda worker: self._make(last, worker))

    def _by_first(self, spec: GrammarSpec, worker: WorkerProcess, deadline_s: float) -> CompileOutcome:
        """The grammar, of the first library that takes it."""
        reasons: dict[str, str] = {}
        for one in with_fallbacks(spec):
            try:
                return self._loaded(one, *worker.run(one, deadline_s))
            except RefusedError as error:
                reasons[one.backend] = error.reason
        raise refusal(spec, reasons)

    @property
    def _wall_s(self) -> float:
        return WALL_FACTOR * self.setup.cpu_s + WALL_EXTRA_S

    def _late(self, spec: GrammarSpec) -> LateError:
        logger.warning(
            "a grammar (%s) was given up: it was not compiled within %g s, as other programs leave compile workers "
            "too little CPU time", spec.kind, self._wall_s,
        )  # fmt: skip
        return LateError(
            f"the grammar ({spec.kind}) was not compiled within {self._wall_s:g} s: the machine is too busy",
            hint="try again later, use a simpler grammar, or start the engine with a larger "
            "structured_outputs_compile_timeout",
            field=f"structured_outputs.{spec.kind}",
        )

    def _loaded(self, spec: GrammarSpec, compiled: bytes, is_expensive: bool) -> CompileOutcome:
        try:
            grammar = self._backend(spec.backend).load(spec, compiled)
            grammar.spec, grammar.is_expensive = spec, is_expensive
            return CompileOutcome(grammar, len(compiled))
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
    """A grammar to be compiled.

    Attributes:
        is_last: what takes too much CPU time gets no further try.
        left_s: wall time that is left for it.
    """

    spec: GrammarSpec
    tenant: str
    made: Future[CompileOutcome]
    is_last: bool
    left_s: float
