"""Rows of a step that are gone on with alone, and back: copies by number. Called by layers; stateless."""

from __future__ import annotations

import torch

from quire.errors import ShapeError
from quire.kernels.native.checks import FLOATS, check_size, check_tensor
from quire.kernels.native.runtime import NativeRuntime


def take_rows(runtime: NativeRuntime, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Row ids[i] of `x` for every i.

    Args:
        x: [num_rows, size] bfloat16 or float32; rows may be strided.
        ids: [n] int64.

    Returns:
        [n, size], dtype of `x`.

    Raises:
        ShapeError: a size, dtype, device, stride or id differs from the above.

    Reference: x[ids]
    """
    check_tensor("x", x, FLOATS, (-1, -1), strided_rows=True)
    out = runtime.empty(len(ids), x.shape[1], dtype=x.dtype)
    _copy(runtime, x, out, ids, is_from=True)
    return out


def put_rows(runtime: NativeRuntime, x: torch.Tensor, ids: torch.Tensor, num_rows: int) -> torch.Tensor:
    """A matrix whose row ids[i] is row i of `x`; its other rows hold anything.

    Args:
        x: [n, size] bfloat16 or float32; rows may be strided.
        ids: [n] int64, distinct.

    Returns:
        [num_rows, size], dtype of `x`.

    Raises:
        ShapeError: a size, dtype, device, stride or id differs from the above.

    Reference: torch.empty(num_rows, size).index_copy_(0, ids, x)
    """
    check_tensor("x", x, FLOATS, (-1, -1), strided_rows=True)
    check_size("num_rows", num_rows)
    out = runtime.empty(num_rows, x.shape[1], dtype=x.dtype)
    _copy(runtime, x, out, ids, is_from=False)
    return out


def _copy(runtime: NativeRuntime, x: torch.Tensor, out: torch.Tensor, ids: torch.Tensor, *, is_from: bool) -> None:
    num_rows = len(out) if is_from else len(x)
    check_tensor("ids", ids, (torch.int64,), (num_rows,))
    fault = runtime.library.copy_rows(
        runtime.pool, x.data_ptr(), x.stride(0) * x.itemsize, len(x), ids.data_ptr() if is_from else 0, out.data_ptr(),
        out.stride(0) * out.itemsize, len(out), 0 if is_from else ids.data_ptr(), num_rows, out.shape[1] * out.itemsize,
    )  # fmt: skip
    if fault is not None:
        raise ShapeError(fault, field="ids")
