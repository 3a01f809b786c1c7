"""StepGraph: the kernel calls of one step, recorded while they run and replayed by one call.

Between two kernels of a step lies Python, whose objects the weights drive out of the processor's caches: a recorded
step needs none. Addresses are recorded as they are, so results go to a `GraphArena`, and inputs to buffers that stay.
Made by the worker.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from quire.errors import CommunicationError, ShapeError
from quire.kernels.native.memory import huge_zeros
from quire.kernels.native.runtime import NativeRuntime

_ALIGNMENT = 64  # bytes


class GraphArena:
    """Memory for the results of a step, which all graphs share: one of them runs at a time.

    Args:
        num_bytes: of all results of one step.
    """

    def __init__(self, num_bytes: int) -> None:
        self._memory = huge_zeros((num_bytes,), torch.uint8)
        self._used = 0
        self.has_overflowed = False

    def reset(self) -> None:
        """Begin a step: what the step before put here may be overwritten."""
        self._used, self.has_overflowed = 0, False

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Part of the arena; memory of its own, which no graph may keep, once the arena is full."""
        num_bytes = math.prod(shape) * dtype.itemsize
        end = self._used + num_bytes
        if end > len(self._memory):
            self.has_overflowed = True
            return torch.empty(shape, dtype=dtype)
        part = self._memory[self._used : end].view(dtype).view(shape)
        self._used = -(-end // _ALIGNMENT) * _ALIGNMENT
        return part

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` is part of the arena."""
        return tensor.untyped_storage().data_ptr() == self._memory.untyped_storage().data_ptr()


class StepGraph:
    """The calls of one step on fixed addresses. The caller keeps alive what they point to.

    Args:
        runtime: its kernels and threads.
        arena: where results go.

    Attributes:
        handle: the library's object.
    """

    def __init__(self, runtime: NativeRuntime, arena: GraphArena) -> None:
        self._runtime = runtime
        self._arena = arena
        self.handle = runtime.library.StepGraph()

    @property
    def num_calls(self) -> int:
        """Kernels that a replay runs."""
        return int(self.handle.num_calls)

    @contextmanager
    def recording(self, *, goes_on: bool = False) -> Iterator[None]:
        """Note the kernels that run inside, on this thread.

        Args:
            goes_on: results of the step that was recorded last stay as they are, as this one reads them.
        """
        self.handle.begin()
        if not goes_on:
            self._arena.reset()
        self._runtime.scratch = self._arena
        try:
            yield
        finally:
            self.handle.end()
            self._runtime.scratch = None

    def replay(self) -> None:
        """Run the kernels again.

        Raises:
            ShapeError: an index among the inputs leads out of a tensor; calls before that one have run.
            CommunicationError: another rank has ended, or did not come.
        """
        try:
            fault = self._runtime.library.replay_step(self.handle, self._runtime.pool)
        except RuntimeError as error:
            raise CommunicationError(str(error)) from None
        check_fault(fault)


def check_fault(fault: str | None) -> None:
    """Raise what a replay found wrong with a call, if anything."""
    if fault is not None:
        raise ShapeError(fault, hint="indices of one step must belong to one cache and one batch")
