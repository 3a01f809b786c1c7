"""Tensors surrounded by a known pattern, to see that a kernel writes where it should and nowhere else."""

from __future__ import annotations

import torch

GUARD = 0x5A
GUARD_BYTES = 192


class Guarded:
    """`tensor` has the given shape and lies between two bands of guard bytes; filled with them too."""

    def __init__(self, *shape: int, dtype: torch.dtype = torch.float32) -> None:
        num_bytes = int(torch.Size(shape).numel()) * dtype.itemsize
        self._raw = torch.full((num_bytes + 2 * GUARD_BYTES,), GUARD, dtype=torch.uint8)
        self.tensor = self._raw[GUARD_BYTES : GUARD_BYTES + num_bytes].view(dtype).view(shape)
        self._num_bytes = num_bytes

    def assert_bands(self) -> None:
        """Both bands still hold the pattern."""
        assert (self._raw[:GUARD_BYTES] == GUARD).all(), "written before the start"
        assert (self._raw[GUARD_BYTES + self._num_bytes :] == GUARD).all(), "written past the end"


def guarded(values: torch.Tensor) -> Guarded:
    """A guarded copy of `values`."""
    out = Guarded(*values.shape, dtype=values.dtype)
    out.tensor.copy_(values)
    return out


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Normal numbers that depend on the shape and the seed alone."""
    generator = torch.Generator().manual_seed(seed + 1000 * sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype)


def assert_close(actual: torch.Tensor, expected: torch.Tensor, atol: float | torch.Tensor, rtol: float = 0.0) -> None:
    """Close, and NaN nowhere: a comparison that NaN fails."""
    assert actual.shape == expected.shape, f"{actual.shape} != {expected.shape}"
    difference = (actual.double() - expected.double()).abs()
    is_close = difference <= atol + rtol * expected.double().abs()
    assert bool(is_close.all()), f"largest difference {difference.max()}"


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal byte for byte."""
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
    )
