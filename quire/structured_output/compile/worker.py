"""The process in which grammars are compiled: one that may be killed when a grammar takes too much.

Started by `worker_process`. It reads a `WorkerSetup` and then one `GrammarSpec` after another from its standard input,
and answers each with a `CompileResult` and, of what was compiled, a `ProbeResult`. Loads no torch. Each grammar is
compiled and tried by a child of its own, so that one that fails costs no new start, and the kernel holds the child to
its limits: too much CPU time ends it by SIGPROF, and too much memory it does not get. The engine, which waits no longer
than for a while, ends both, as they are a process group.
"""

from __future__ import annotations

import mmap
import os
import resource
import select
import signal
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import IO

import msgspec

from quire.structured_output.compile.messages import (
    CompileResult,
    ProbeResult,
    WorkerSetup,
    read_message,
    write_message,
)
from quire.structured_output.compile.probe import CPU_S, FAST_CPU_S, Probe
from quire.structured_output.interface import GrammarError, GrammarSpec, StructuredOutputBackend
from quire.structured_output.registry import backend_class
from quire.structured_output.vocabulary import read_vocabulary
from quire.utils.children import describe_exit

NICENESS = 10
OVER_MEMORY = "over memory"
OVER_TIME = "over time"
WATCH_INTERVAL_S = 0.1
STATM = Path("/proc/self/statm")


def main() -> None:
    """Serve until standard input closes, or the engine is gone."""
    with suppress(BrokenPipeError):
        _serve()


def _serve() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(NICENESS)
    inputs, outputs = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints must not be read as an answer
    data = read_message(inputs)
    if data is None:
        return
    setup = msgspec.msgpack.decode(data, type=WorkerSetup)
    vocabulary = read_vocabulary(setup.tokenizer_path, setup.vocab_size, setup.eos_token_id)
    probe = Probe(vocabulary, CPU_S if setup.is_background else FAST_CPU_S)
    backends: dict[str, StructuredOutputBackend] = {}
    while (data := read_message(inputs)) is not None:
        spec = msgspec.msgpack.decode(data, type=GrammarSpec)
        if spec.backend not in backends:
            backends[spec.backend] = backend_class(spec.backend)(vocabulary)
        _compile_in_child(backends[spec.backend], probe, spec, setup, outputs)


def _compile_in_child(
    backend: StructuredOutputBackend, probe: Probe, spec: GrammarSpec, setup: WorkerSetup, outputs: IO[bytes]
) -> None:
    """Answer `spec`; for a child that could not answer itself, say what is wrong."""
    before_bytes = _resident_bytes()
    with mmap.mmap(-1, 1) as is_compiled:  # shared with the child
        child = os.fork()
        if child == 0:
            code = 1
            try:
                _answer(backend, probe, spec, setup, outputs, is_compiled)
                code = 0
            except MemoryError:
                code = EXIT_OVER_MEMORY
            except Exception:
                traceback.print_exc()
            finally:  # whatever was raised: only the parent goes back to the loop
                os._exit(code)
        _watch(child)
        _, status, usage = os.wait4(child, 0)
        if status == 0:
            return
        if is_compiled[0]:  # it ended in the probe
            write_message(outputs, ProbeResult(is_expensive=True, cpu_s=usage.ru_utime + usage.ru_stime))
            return
    grown_bytes = usage.ru_maxrss * 1024 - before_bytes
    result = result_of_death(os.waitstatus_to_exitcode(status), grown_bytes, setup.memory_bytes)
    write_message(outputs, msgspec.structs.replace(result, cpu_s=usage.ru_utime + usage.ru_stime))


def _answer(
    backend: StructuredOutputBackend,
    probe: Probe,
    spec: GrammarSpec,
    setup: WorkerSetup,
    outputs: IO[bytes],
    is_compiled: mmap.mmap,
) -> None:
    """In the child; `is_compiled` becomes 1 when only the probe is left to be answered."""
    result = _compile_within_limits(backend, spec, setup)
    write_message(outputs, msgspec.structs.replace(result, cpu_s=time.process_time()))
    if result.error is not None:
        return
    is_compiled[0] = 1
    signal.setitimer(signal.ITIMER_PROF, setup.cpu_s)
    with suppress(GrammarError):  # what the library cannot follow it says again where it is followed
        probe.follow(backend.load(spec, result.compiled))
    write_message(outputs, ProbeResult(cpu_s=time.process_time()))


def result_of_death(code: int, grown_bytes: int, limit_bytes: int) -> CompileResult:
    """The answer for a child that gave none.

    Args:
        code: its return code, negative for a signal.
        grown_bytes: memory that it took at most.
        limit_bytes: memory that it may take; what comes near it can have met it.
    """
    if code == -signal.SIGPROF:
        return CompileResult(error=OVER_TIME)
    is_near_limit = code in _OUT_OF_MEMORY and grown_bytes > limit_bytes // 2
    if code == EXIT_OVER_MEMORY or is_near_limit:
        return CompileResult(error=OVER_MEMORY)
    if code in _CRASHES:
        return CompileResult(error=f"the compiler crashed on it (it {describe_exit(code)})")
    return CompileResult(died=describe_exit(code))


EXIT_OVER_MEMORY = 77
_GLIBC_OUT_OF_MEMORY = 127
_CRASHES = (-signal.SIGABRT, -signal.SIGSEGV, -signal.SIGBUS, -signal.SIGTRAP, -signal.SIGILL, -signal.SIGFPE)
_OUT_OF_MEMORY = (*_CRASHES, _GLIBC_OUT_OF_MEMORY, -signal.SIGKILL)
"""By which a library ends that does not get memory, the C library, or the kernel when the machine has none."""


def _resident_bytes() -> int:
    return int(STATM.read_text().split()[1]) * resource.getpagesize() if STATM.exists() else 0


def _watch(child: int) -> None:
    """Until `child` ends; end it when no request waits any more."""
    engine = os.getppid()
    descriptor = os.pidfd_open(child)
    try:
        while not select.select([descriptor], [], [], WATCH_INTERVAL_S)[0]:
            if os.getppid() != engine:
                os.kill(child, signal.SIGKILL)
    finally:
        os.close(descriptor)


def _compile_within_limits(backend: StructuredOutputBackend, spec: GrammarSpec, setup: WorkerSetup) -> CompileResult:
    if setup.is_background:
        with suppress(OSError):  # a kernel or a sandbox without it
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    limit_memory(setup.memory_bytes)
    signal.setitimer(signal.ITIMER_PROF, setup.cpu_s)
    try:
        return CompileResult(backend.compile(spec))
    except MemoryError:
        return CompileResult(error=OVER_MEMORY)
    except GrammarError as error:
        message = str(error)
        return CompileResult(error=OVER_MEMORY if "bad_alloc" in message else message)
    except RuntimeError as error:  # as xgrammar's binding reports an exception of C++
        if "bad_alloc" in str(error):
            return CompileResult(error=OVER_MEMORY)
        raise
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def limit_memory(more_bytes: int) -> None:
    """Let the process take so much more memory than it has."""
    if not STATM.exists():
        return
    soft = int(STATM.read_text().split()[0]) * resource.getpagesize() + more_bytes
    resource.setrlimit(resource.RLIMIT_AS, (soft, resource.getrlimit(resource.RLIMIT_AS)[1]))
