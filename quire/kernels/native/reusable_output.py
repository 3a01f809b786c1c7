"""ReusableOutput: memory for a large result that is made anew in every step, such as logits. Made by its user."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from quire.kernels.native.memory import huge_zeros
from quire.kernels.native.runtime import NativeRuntime


class ReusableOutput:
    """Lends its memory to the first result of a kernel; the allocator would map and clear new pages each time."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._last = self._memory
        self._is_lent = True

    @contextmanager
    def lent_to(self, runtime: NativeRuntime) -> Iterator[None]:
        """The first result of a kernel inside is valid until the next `with`; others have memory of their own."""
        self._is_lent, runtime.scratch = False, self
        try:
            yield
        finally:
            runtime.scratch = None

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """As `Scratch`."""
        if self._is_lent:
            return torch.empty(shape, dtype=dtype)
        self._is_lent = True
        if self._last.shape != shape or self._last.dtype != dtype:
            num_bytes = math.prod(shape) * dtype.itemsize
            if num_bytes > len(self._memory):
                self._memory = huge_zeros((num_bytes,), torch.uint8)
            self._last = self._memory[:num_bytes].view(dtype).view(shape)
        return self._last
