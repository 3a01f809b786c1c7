"""KernelClock: the extension module with a clock around every kernel; a runtime has it while a profile is taken.

Wrappers look their kernels up at the runtime for each call, so nothing is tested, and nothing is slower, while no
profile is taken. The calling thread takes part in each kernel and returns when all threads are done: its wall time is
the kernel's.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

from quire.kernels.native.kernel_work import KernelWork, work_of

MAX_CALLS = 2_000_000
ARGUMENTS = ("KvCache", "LatentCache", "RecurrentBatch")
"""Classes of arguments, made for each call, whose own arguments are needed to count its work."""


class KernelCall(NamedTuple):
    """One call; times in nanoseconds of `time.perf_counter_ns`. `work`: None = it is not known."""

    name: str
    start_ns: int
    duration_ns: int
    work: KernelWork | None


class KernelClock:
    """Calls a library, and notes each call.

    Args:
        library: the extension module.

    Attributes:
        calls: the first `MAX_CALLS`.
    """

    def __init__(self, library: Any) -> None:
        self._library = library
        self._made: dict[int, tuple[Any, ...]] = {}
        self.calls: list[KernelCall] = []

    def __getattr__(self, name: str) -> Any:
        """A function with a clock around it, made once; anything else as it is."""
        found = getattr(self._library, name)
        if name in ARGUMENTS:
            found = self._noting(found)
        elif not isinstance(found, type) and callable(found):
            found = self._clocked(name, found)
        else:
            return found
        setattr(self, name, found)
        return found

    def _noting(self, kind: Callable[..., Any]) -> Callable[..., Any]:
        """Makes an argument and remembers what from; a later one at the same address takes its place."""

        def make(*args: Any) -> Any:
            made = kind(*args)
            self._made[id(made)] = args
            return made

        return make

    def _clocked(self, name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
        calls, now = self.calls, time.perf_counter_ns

        def made(argument: Any) -> tuple[Any, ...]:
            return self._made[id(argument)]

        def call(*args: Any) -> Any:
            start = now()
            result = kernel(*args)
            if len(calls) < MAX_CALLS:
                calls.append(KernelCall(name, start, now() - start, work_of(name, args, made)))
            return result

        return call
