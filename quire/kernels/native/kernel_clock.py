"""KernelClock: the extension module with a clock around every kernel; a runtime has it while a profile is taken.

Wrappers look their kernels up at the runtime for each call, so nothing is tested, and nothing is slower, while no
profile is taken. The calling thread takes part in each kernel and returns when all threads are done: its wall time is
the kernel's.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

MAX_CALLS = 2_000_000
_WEIGHT_BYTES = {"linear_int8": 1.0, "linear_int4": 0.5}


class KernelCall(NamedTuple):
    """One call; times in nanoseconds of `time.perf_counter_ns`. `sizes`: rows, inputs and outputs of a product."""

    name: str
    start_ns: int
    duration_ns: int
    sizes: tuple[int, int, int] | None

    @property
    def flops(self) -> float:
        """Of a product; 0 = not known."""
        return 0.0 if self.sizes is None else 2.0 * self.sizes[0] * self.sizes[1] * self.sizes[2]

    @property
    def num_bytes(self) -> float:
        """Weights, inputs and outputs of a product, numbers of two bytes; 0 = not known."""
        if self.sizes is None:
            return 0.0
        rows, inputs, outputs = self.sizes
        return _WEIGHT_BYTES.get(self.name, 2.0) * inputs * outputs + 2.0 * rows * (inputs + outputs)


class KernelClock:
    """Calls a library, and notes each call.

    Args:
        library: the extension module.

    Attributes:
        calls: the first `MAX_CALLS`.
    """

    def __init__(self, library: Any) -> None:
        self._library = library
        self.calls: list[KernelCall] = []

    def __getattr__(self, name: str) -> Any:
        """A function with a clock around it, made once; anything else as it is."""
        found = getattr(self._library, name)
        if isinstance(found, type) or not callable(found):
            return found
        clocked = self._clocked(name, found)
        setattr(self, name, clocked)
        return clocked

    def _clocked(self, name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
        calls, sizes_of, now = self.calls, _SIZES.get(name), time.perf_counter_ns

        def call(*args: Any) -> Any:
            start = now()
            result = kernel(*args)
            if len(calls) < MAX_CALLS:
                calls.append(KernelCall(name, start, now() - start, None if sizes_of is None else sizes_of(args)))
            return result

        return call


def _plain(args: tuple[Any, ...]) -> tuple[int, int, int]:
    """Of `linear`: a gated one computes two outputs for each that it keeps."""
    return args[8], args[9], args[10] * (2 if args[14] else 1)


def _stored(args: tuple[Any, ...]) -> tuple[int, int, int]:
    """Of `linear_int8`, `linear_int4`."""
    return args[9], args[11], args[10] * (2 if args[16] else 1)


_SIZES: dict[str, Callable[[tuple[Any, ...]], tuple[int, int, int]]] = {
    "linear": _plain, "linear_int8": _stored, "linear_int4": _stored,
}  # fmt: skip
