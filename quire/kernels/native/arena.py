"""HugeArena: many tensors in a few mappings of huge pages; each tensor keeps its mapping alive."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from quire.kernels.native.memory import huge_zeros

CHUNK_BYTES = 64 << 20
_ALIGNMENT = 64  # bytes; a cache line, and the widest vector register


class HugeArena:
    """Hands out zeroed tensors at multiples of 64 bytes; large ones get a mapping of their own."""

    def __init__(self) -> None:
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A new tensor of zeros.

        Raises:
            NotEnoughMemoryError: the memory is not there.
        """
        num_bytes = math.prod(shape) * dtype.itemsize
        padded = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        if padded > CHUNK_BYTES // 4:
            raw = huge_zeros((padded,), torch.uint8)
        else:
            if self._used + padded > len(self._chunk):
                self._chunk, self._used = huge_zeros((CHUNK_BYTES,), torch.uint8), 0
            raw = self._chunk[self._used : self._used + padded]
            self._used += padded
        return raw[:num_bytes].view(dtype).view(tuple(shape))
