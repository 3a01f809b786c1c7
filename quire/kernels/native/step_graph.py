"""StepGraph: the kernel calls of one step, recorded when it is computed and replayed by one call, for any size.

Between two kernels of a step lies Python, whose objects the weights drive out of the processor's caches: a recorded
step needs none. Addresses are recorded as they are, so results go to a `GraphArena`, and inputs to buffers that stay.
What differs between recordings of a step with other numbers of tokens are the arguments that count tokens: with these
set, a replay computes a step of any size up to the recorded one. Made by the worker.
"""

from __future__ import annotations

import ctypes
import math
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from quire.errors import CommunicationError, ShapeError
from quire.kernels.native.memory import huge_zeros
from quire.kernels.native.runtime import NativeRuntime

_ALIGNMENT = 64  # bytes

Place = tuple[int, int]
"""Where a result begins in an arena, and how many bytes it has."""


class GraphArena:
    """Memory for the results of a step, which all graphs share: one of them runs at a time.

    A result's memory is used again once no tensor is left in it, as what is recorded reads it no more.

    Args:
        num_bytes: of all results of a step that are needed at once.

    Attributes:
        places: of the step's results, in their order.
        has_overflowed: some result did not fit.
    """

    def __init__(self, num_bytes: int) -> None:
        self._memory = huge_zeros((num_bytes,), torch.uint8)
        self._given: Sequence[Place] | None = None
        self._in_use: dict[int, int] = {}
        self.places: list[Place] = []
        self.has_overflowed = False

    def reset(self, places: Sequence[Place] | None = None) -> None:
        """Begin a step: what the step before put here may be overwritten.

        Args:
            places: of a step with more tokens, whose results go to the same places; None = where there is room.
        """
        self._given, self._in_use, self.places, self.has_overflowed = places, {}, [], False

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Part of the arena, integers as zeros; memory of its own, which no graph may keep, where there is no room."""
        num_bytes = math.prod(shape) * dtype.itemsize
        start = self._find(num_bytes) if self._given is None else self._find_given(num_bytes)
        if start is None or not num_bytes:
            self.has_overflowed = self.has_overflowed or start is None
            return torch.empty(shape, dtype=dtype)
        address = self._memory.data_ptr() + start
        if not dtype.is_floating_point:  # ids, which callers look at even where no kernel has written them
            ctypes.memset(address, 0, num_bytes)
        buffer = (ctypes.c_char * num_bytes).from_address(address)
        weakref.finalize(buffer, self._in_use.pop, start, None).atexit = False
        self._in_use[start] = start + num_bytes
        self.places.append((start, num_bytes))
        return torch.frombuffer(buffer, dtype=torch.uint8).view(dtype).view(shape)

    def _find(self, num_bytes: int) -> int | None:
        """The first gap that is large enough."""
        start = 0
        for begin, end in sorted(self._in_use.items()):
            if start + num_bytes <= begin:
                break
            start = -(-end // _ALIGNMENT) * _ALIGNMENT
        return start if start + num_bytes <= len(self._memory) else None

    def _find_given(self, num_bytes: int) -> int | None:
        """The place of the result with the same number."""
        assert self._given is not None, "called where places are given"
        start, most = self._given[len(self.places)] if len(self.places) < len(self._given) else (0, -1)
        return start if num_bytes <= most else None

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` is part of the arena."""
        return 0 <= tensor.untyped_storage().data_ptr() - self._memory.data_ptr() < len(self._memory)


class StepGraph:
    """The calls of one step on fixed addresses. The caller keeps alive what they point to.

    Args:
        runtime: its kernels and threads.
        arena: where results go.
        is_run: kernels run while they are recorded; else they are noted alone, and results mean nothing.

    Attributes:
        handle: the library's object.
    """

    def __init__(self, runtime: NativeRuntime, arena: GraphArena, *, is_run: bool = True) -> None:
        self._runtime = runtime
        self._arena = arena
        self.handle = runtime.library.StepGraph(is_run)
        self._sizes: tuple[int, ...] | None = None

    @property
    def num_calls(self) -> int:
        """Kernels that a replay runs."""
        return int(self.handle.num_calls)

    @contextmanager
    def recording(self, places: Sequence[Place] | None = None, *, goes_on: bool = False) -> Iterator[None]:
        """Note the kernels that are called inside, on this thread.

        Args:
            places: as of `GraphArena.reset`.
            goes_on: results of the step that was recorded last stay as they are, as this one reads them.
        """
        self.handle.begin()
        if not goes_on:
            self._arena.reset(places)
        self._runtime.scratch = self._arena
        try:
            yield
        finally:
            self.handle.end()
            self._runtime.scratch = None

    def generalize(self, sizes: tuple[int, ...], others: Sequence[tuple[StepGraph, tuple[int, ...]]]) -> bool:
        """From now on replays may have any sizes up to those that were recorded.

        Args:
            sizes: what the recorded step has: a number of tokens, and what else its calls depend on.
            others: at least two recordings of the same step at the same places, and their sizes, smaller ones: in no
                two of all recordings have sizes the same ratio.

        Returns:
            Whether they are the same calls, whose arguments are the same or multiples of a size.
        """
        (first, first_sizes), *rest = others
        return bool(self.handle.learn_sizes(list(sizes), first.handle, list(first_sizes))) and all(
            self.handle.predicts(other.handle, list(other_sizes)) for other, other_sizes in rest
        )

    def replay(self, sizes: tuple[int, ...] | None = None) -> None:
        """Run the kernels again.

        Args:
            sizes: of the step; None = as it was recorded.

        Raises:
            ShapeError: an index among the inputs leads out of a tensor; calls before that one have run.
            CommunicationError: another rank has ended, or did not come.
        """
        if sizes != self._sizes and sizes is not None:
            self.handle.resize(list(sizes))
            self._sizes = sizes
        try:
            fault = self._runtime.library.replay_step(self.handle, self._runtime.pool)
        except RuntimeError as error:
            raise CommunicationError(str(error)) from None
        check_fault(fault)


def check_fault(fault: str | None) -> None:
    """Raise what a replay found wrong with a call, if anything."""
    if fault is not None:
        raise ShapeError(fault, hint="indices of one step must belong to one cache and one batch")
