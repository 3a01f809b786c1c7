"""Kernels of one pass over rows of activations. Called by layers; stateless."""

from __future__ import annotations

import torch

from quire.kernels.native.checks import DTYPE_CODES, check_tensor
from quire.kernels.native.runtime import NativeRuntime

FLOATS = (torch.bfloat16, torch.float32)


def rms_norm(
    runtime: NativeRuntime, x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """Normalise each row of `x`, or of x + residual, which then replaces `residual` in place.

    Args:
        x: [num_rows, size] bfloat16 or float32; rows may be strided.
        weight: [size].
        residual: [num_rows, size]; mutated.

    Returns:
        [num_rows, size], dtype of `x`.

    Raises:
        ShapeError: a size, dtype, device or stride differs from the above.

    Cost: reads x (and reads and writes residual), writes the result; bandwidth bound.
    Reference: kernels/reference/norm.py
    """
    check_tensor("x", x, FLOATS, (-1, -1), strided_rows=True)
    num_rows, size = x.shape
    check_tensor("weight", weight, (x.dtype,), (size,))
    residual_ptr = 0
    if residual is not None:
        check_tensor("residual", residual, (x.dtype,), (num_rows, size))
        residual_ptr = residual.data_ptr()
    out = torch.empty(num_rows, size, dtype=x.dtype)
    runtime.library.rms_norm(
        runtime.tier_idx, runtime.pool, x.data_ptr(), x.stride(0), residual_ptr, weight.data_ptr(), out.data_ptr(),
        num_rows, size, eps, DTYPE_CODES[x.dtype],
    )  # fmt: skip
    return out
