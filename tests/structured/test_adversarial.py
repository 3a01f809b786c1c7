"""Forms that are dear to compile are refused or compiled within their budget; the next grammar is none the worse."""

from __future__ import annotations

import functools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.adversarial import FORMS
from quire.config.structured_outputs import BACKENDS, StructuredOutputsConfig
from quire.core.structured_outputs import StructuredOutputsParams
from quire.errors import EngineGenerateError, QuireClientError
from quire.models.hub import resolve_model_path
from quire.structured_output.choose import resolve_structured_outputs
from quire.structured_output.compile import pool as pool_module
from quire.structured_output.compile.errors import BudgetError
from quire.structured_output.compile.fast_budget import FastBudget
from quire.structured_output.compile.messages import WorkerSetup
from quire.structured_output.compile.pool import NUM_FAST_WORKERS, CompilePool
from quire.structured_output.compile.worker_queue import WorkerQueue
from quire.structured_output.interface import GrammarSpec
from quire.structured_output.spec import spec_of
from tests.structured.libraries import needs_libraries

pytestmark = [
    needs_libraries,
    pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="limits of memory need /proc"),
]
CPU_S, MEMORY_BYTES, ENOUGH_BYTES = 1.0, 200 << 20, 4 << 30
PLAIN = GrammarSpec(kind="regex", text="[a-f]{3}", backend="xgrammar")


@pytest.fixture(scope="module")
def pool() -> Iterator[CompilePool]:
    setup = WorkerSetup(str(resolve_model_path("leaf", None, None)), 3072, 2, CPU_S, MEMORY_BYTES)
    pool = CompilePool(setup)
    pool.compile(PLAIN).result()
    yield pool
    pool.close()


def spec(name: str, number: int) -> GrammarSpec:
    return spec_of(
        resolve_structured_outputs(StructuredOutputsParams.of(FORMS[name](number)), StructuredOutputsConfig())
    )


@pytest.mark.parametrize("name", FORMS)
def test_a_form_that_is_dear_to_compile_is_refused_or_followed_within_its_budget(pool: CompilePool, name: str):
    try:
        grammar, num_bytes = pool.compile(spec(name, 1)).result()
    except QuireClientError as error:
        assert (error.field or "").startswith("structured_outputs"), error
        assert "<state>" not in str(error) and "NoExtension" not in str(error), "a library's inner state"
    else:
        assert num_bytes < MEMORY_BYTES
        bitmask = np.empty((1, 96), dtype=np.int32)
        grammar.start().fill_bitmask(bitmask, 0)


def test_a_grammar_over_its_time_ends_its_own_child_and_the_worker_goes_on():
    pool = CompilePool(WorkerSetup(str(resolve_model_path("leaf", None, None)), 3072, 2, 0.2, ENOUGH_BYTES))
    try:
        with pytest.raises(BudgetError, match="takes more than 0.2 s"):
            pool.compile(spec("many_properties", 2)).result()  # starts a worker of each lane
        workers = {one._process.pid for one in pool._workers if one._process is not None}
        with pytest.raises(BudgetError, match="takes more than 0.2 s"):
            pool.compile(spec("many_properties", 3)).result()
        pool.compile(PLAIN).result()
        assert workers == {one._process.pid for one in pool._workers if one._process is not None}
        while any(children(pid) for pid in workers):  # one that has answered is about to end
            time.sleep(0.01)
    finally:
        pool.close()


def is_running(pid: int) -> bool:
    """Whether a process has not ended; one that has may wait to be reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def stop_compiling(pool: CompilePool, made: Future[Any]) -> int:
    """Stop the child that compiles `made`, as a machine without time for it does; the child's process id."""
    while True:
        assert not made.done()
        for worker in pool._workers:
            for child in children(worker._process.pid) if worker._process is not None else ():
                os.kill(child, signal.SIGSTOP)
                return child
        time.sleep(0.001)


@pytest.mark.parametrize("is_fast", [True, False], ids=["fast", "slow"])
def test_a_grammar_that_gets_no_cpu_time_is_given_up_and_its_processes_are_replaced(
    monkeypatch: pytest.MonkeyPatch, is_fast: bool
):
    budget = FastBudget(clock=lambda: 0.0)
    if is_fast:
        monkeypatch.setattr(pool_module, "FAST_CPU_S", 60.0)
    else:
        budget.charge("", 1.0)
    setup = WorkerSetup(str(resolve_model_path("leaf", None, None)), 3072, 2, 60.0, ENOUGH_BYTES)
    pool = CompilePool(setup, budget)
    try:
        pool.compile(PLAIN).result()
        before = {one._process.pid for one in pool._workers if one._process is not None}
        monkeypatch.setattr(pool_module, "WALL_FACTOR", 0.0)
        monkeypatch.setattr(pool_module, "WALL_EXTRA_S", 1.0)
        late = pool.compile(spec("many_properties", 4))
        stopped = stop_compiling(pool, late)
        with pytest.raises(BudgetError, match="was not compiled within 1 s: the machine is too busy") as caught:
            late.result()
        assert "structured_outputs_compile_timeout" in (caught.value.hint or "")
        monkeypatch.setattr(pool_module, "WALL_EXTRA_S", 60.0)
        assert pool.compile(GrammarSpec(kind="regex", text="[a-f]{8}", backend="xgrammar")).result()
        while is_running(stopped):
            time.sleep(0.01)
        assert not before & {one._process.pid for one in pool._workers if one._process is not None}
    finally:
        pool.close()


def test_a_grammar_over_its_memory_is_refused_by_the_kernel_and_the_worker_goes_on():
    pool = CompilePool(WorkerSetup(str(resolve_model_path("leaf", None, None)), 3072, 2, 60.0, MEMORY_BYTES))
    try:
        with pytest.raises(BudgetError, match="more than 200 MiB"):
            pool.compile(spec("long_strings", 1)).result()  # starts a worker of each lane
        workers = {one._process.pid for one in pool._workers if one._process is not None}
        with pytest.raises(BudgetError, match="more than 200 MiB"):
            pool.compile(spec("long_strings", 2)).result()
        pool.compile(PLAIN).result()
        assert workers == {one._process.pid for one in pool._workers if one._process is not None}
    finally:
        pool.close()


def test_a_child_that_has_taken_long_runs_only_where_a_processor_is_idle(pool: CompilePool):
    future = pool.compile(spec("many_properties", 3))
    policies = set()
    while not future.done():
        for worker in pool._workers:
            for child in children(worker._process.pid) if worker._process is not None else ():
                try:
                    policies.add(os.sched_getscheduler(child))
                except ProcessLookupError:
                    continue
        time.sleep(0.02)
    assert isinstance(future.exception(), BudgetError) and os.SCHED_IDLE in policies


def test_a_tenant_beyond_its_share_of_the_fast_queue_has_the_slow_one_and_others_keep_theirs(
    pool: CompilePool, monkeypatch: pytest.MonkeyPatch
):
    budget = FastBudget(clock=lambda: 0.0)
    monkeypatch.setattr(pool, "_fast_budget", budget)
    budget.charge("mallory", 1.0)
    fast_s, slow_s = cpu_of(pool._fast), cpu_of(pool._slow)
    pool.compile(GrammarSpec(kind="regex", text="[a-f]{5}", backend="xgrammar"), "mallory").result()
    assert cpu_of(pool._fast) == fast_s and cpu_of(pool._slow) > slow_s
    pool.compile(GrammarSpec(kind="regex", text="[a-f]{6}", backend="xgrammar"), "bob").result()
    assert cpu_of(pool._fast) > fast_s and not budget.is_spent("bob")


def cpu_of(queue: WorkerQueue) -> float:
    return sum(worker.cpu_s for worker in queue.workers)


def test_a_plain_grammar_does_not_wait_for_dear_ones():
    pool = CompilePool(WorkerSetup(str(resolve_model_path("leaf", None, None)), 3072, 2, 60.0, ENOUGH_BYTES))
    try:
        dear = [pool.compile(spec("many_properties", number)) for number in range(10, 14)]
        plain = GrammarSpec(kind="regex", text="[a-f]{4}", backend="xgrammar")
        pool.compile(plain).result()
        assert not any(one.done() for one in dear)
        dear[3].cancel()
    finally:
        pool.close()
    assert dear[3].cancelled()


def test_a_tenants_flood_of_new_grammars_is_before_anothers_grammar_by_one_for_each_worker():
    pool = CompilePool(WorkerSetup(str(resolve_model_path("leaf", None, None)), 3072, 2, CPU_S, ENOUGH_BYTES))
    is_queued, begun = threading.Event(), []

    def held(spec: GrammarSpec, deadline_s: float, run: Callable[[GrammarSpec, float], bytes]) -> bytes:
        is_queued.wait()
        begun.append(spec)
        return run(spec, deadline_s)

    for worker in pool._fast.workers:
        worker.run = functools.partial(held, run=worker.run)  # type: ignore[method-assign]
    try:
        for number in range(10, 26):
            pool.compile(GrammarSpec(kind="regex", text=f"[a-f]{{{number}}}", backend="xgrammar"), "alice")
        bobs = pool.compile(PLAIN, "bob")
        is_queued.set()
        bobs.result()
        assert begun.index(PLAIN) <= 2 * NUM_FAST_WORKERS, "what is under way, and one of alice's turns"
    finally:
        is_queued.set()
        pool.close()


def test_whoever_waits_for_a_grammar_hears_of_a_worker_that_answers_nonsense(pool: CompilePool, monkeypatch):
    def nonsense(spec: GrammarSpec, deadline_s: float) -> bytes:
        raise ValueError("no message")

    for worker in pool._workers:
        monkeypatch.setattr(worker, "run", nonsense)
    with pytest.raises(EngineGenerateError, match="no message"):
        pool.compile(GrammarSpec(kind="regex", text="[a-f]{5}", backend="xgrammar")).result(timeout=30)


def children(pid: int) -> list[int]:
    """Of a process with one thread."""
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.parametrize(
    ("backend", "kind", "text", "is_expensive"),
    [
        ("xgrammar", "grammar", 'root ::= s\ns ::= s s | s s s | [a-z] | ""', True),
        ("xgrammar", "regex", "(([a-z]*)*)*" * 40, True),
        ("guidance", "grammar", 'start: s\ns: s s | s s s | /[a-z]/ | ""', True),
        ("guidance", "grammar", "start: " + "(" * 20 + "/[a-z]/" + "*)" * 20, True),
        *((backend, "regex", "[a-z]{2,40}", False) for backend in BACKENDS),
        *((backend, "json", '{"type": "string", "maxLength": 40}', False) for backend in ("xgrammar", "guidance")),
    ],
)
def test_a_grammar_that_is_expensive_to_follow_is_found_before_the_engine_core_follows_it(
    pool: CompilePool, backend: str, kind: str, text: str, is_expensive: bool
):
    spec = GrammarSpec(kind=kind, text=text, backend=backend)
    assert pool.compile(spec).result().grammar.is_expensive is is_expensive
