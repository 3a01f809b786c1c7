"""The process in which grammars are compiled: one that may be killed when a grammar takes too much.

Started by `compile_pool` as a program. It reads a `WorkerSetup` and then one `GrammarSpec` after another from its
standard input, and answers each with a `CompileResult`. Loads no torch. The kernel holds it to its limits: a grammar
that takes too much CPU time ends it by SIGPROF, and one that takes too much memory gets none.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
from pathlib import Path

import msgspec

from quire.structured_output.compile_messages import CompileResult, WorkerSetup, read_message, write_message
from quire.structured_output.interface import GrammarError, GrammarSpec, StructuredOutputBackend
from quire.structured_output.registry import make_backend
from quire.structured_output.vocabulary import read_vocabulary

NICENESS = 10
OVER_MEMORY = "over memory"


def main() -> None:
    """Serve until standard input closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(NICENESS)
    inputs, outputs = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints must not be read as an answer
    data = read_message(inputs)
    if data is None:
        return
    setup = msgspec.msgpack.decode(data, type=WorkerSetup)
    vocabulary = read_vocabulary(setup.tokenizer_path, setup.vocab_size, setup.eos_token_id)
    backends: dict[str, StructuredOutputBackend] = {}
    while (data := read_message(inputs)) is not None:
        spec = msgspec.msgpack.decode(data, type=GrammarSpec)
        if spec.backend not in backends:
            backends[spec.backend] = make_backend(spec.backend, vocabulary)
        write_message(outputs, _compile_within_limits(backends[spec.backend], spec, setup))


def _compile_within_limits(backend: StructuredOutputBackend, spec: GrammarSpec, setup: WorkerSetup) -> CompileResult:
    _limit_memory(setup.memory_bytes)
    signal.setitimer(signal.ITIMER_PROF, setup.cpu_s)
    try:
        return CompileResult(backend.compile(spec))
    except MemoryError:
        return CompileResult(error=OVER_MEMORY)
    except GrammarError as error:
        message = str(error)
        return CompileResult(error=OVER_MEMORY if "bad_alloc" in message else message)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        _limit_memory(None)


def _limit_memory(more_bytes: int | None) -> None:
    """Let the process take so much more memory than it has; None = as much as there is."""
    statm = Path("/proc/self/statm")
    if not statm.exists():
        return
    soft = resource.RLIM_INFINITY
    if more_bytes is not None:
        soft = int(statm.read_text().split()[0]) * resource.getpagesize() + more_bytes
    resource.setrlimit(resource.RLIMIT_AS, (soft, resource.getrlimit(resource.RLIMIT_AS)[1]))


if __name__ == "__main__":
    main()
