"""Linear layers on packed weights: packing, products, and rows looked up. Called by layers; stateless."""

from __future__ import annotations

import torch

from quire.errors import ShapeError
from quire.kernels.native.checks import (
    DTYPE_CODES,
    FLOATS,
    check_apart,
    check_is_tensor,
    check_rows,
    check_size,
    check_tensor,
)
from quire.kernels.native.runtime import NativeRuntime

PANEL_SIZE = 16
TILE_DEPTH = 32
# Numbers of `RowType` in csrc/include/quire/gemm.h.
_ROW_TYPES = {torch.bfloat16: 0, torch.float32: 1, torch.float16: 2}


def packed_shape(output_size: int, input_size: int, dtype: torch.dtype) -> tuple[int, ...]:
    """Shape of a packed weight: panels of 16 outputs, in tiles of 32 inputs.

    bfloat16: [panels, tiles, 16 pairs of inputs, 16 outputs, 2 of the pair]; float32: [panels, tiles, 16 pairs of
    inputs, 2 of the pair, 16 outputs].

    Raises:
        ShapeError: another dtype.
    """
    if dtype not in FLOATS:
        raise ShapeError(f"weights of {dtype} cannot be packed, only bfloat16 and float32", field="packed")
    panels, tiles = -(-output_size // PANEL_SIZE), -(-input_size // TILE_DEPTH)
    return (panels, tiles, 16, 16, 2) if dtype == torch.bfloat16 else (panels, tiles, 16, 2, 16)


def pack_rows(runtime: NativeRuntime, rows: torch.Tensor, packed: torch.Tensor, first_row: int) -> bool:
    """Write rows of a weight matrix as outputs first_row, first_row + 1, ... of a packed weight, in place.

    Args:
        rows: [n, input_size] bfloat16, float16 or float32, rounded to nearest even; rows may be strided.
        packed: `packed_shape`, allocated zeroed; mutated.
        first_row: any, so that matrices of any size follow each other in one packed weight.

    Returns:
        Whether every packed value is finite.

    Raises:
        ShapeError: a size, dtype, device or stride differs from the above, or the rows lie outside `packed`.

    Cost: reads rows and writes packed; bandwidth bound.
    """
    check_tensor("rows", rows, tuple(_ROW_TYPES), (-1, -1), strided_rows=True)
    num_rows, input_size = rows.shape
    _check_packed(packed, input_size)
    _check_range(packed, first_row, num_rows)
    check_apart("packed", packed, rows=rows)
    is_finite: bool = runtime.library.pack_rows(
        runtime.tier_idx, runtime.pool, rows.data_ptr(), rows.stride(0), _ROW_TYPES[rows.dtype], packed.data_ptr(),
        DTYPE_CODES[packed.dtype], num_rows, input_size, first_row,
    )  # fmt: skip
    return is_finite


def unpack_rows(
    runtime: NativeRuntime, packed: torch.Tensor, input_size: int, first_row: int, num_rows: int
) -> torch.Tensor:
    """Rows first_row, first_row + 1, ... of a packed weight.

    Returns:
        [num_rows, input_size], dtype of `packed`.

    Raises:
        ShapeError: as `pack_rows`.
    """
    _check_packed(packed, input_size)
    _check_range(packed, first_row, num_rows)
    return _read_rows(runtime, packed, input_size, None, first_row, num_rows)


def gather_rows(runtime: NativeRuntime, ids: torch.Tensor, packed: torch.Tensor, input_size: int) -> torch.Tensor:
    """Row ids[i] of a packed weight for every i: the lookup in an embedding that is the output head too.

    Args:
        ids: [n] int32 or int64, each a row of `packed` (its padding to 16 rows included).

    Returns:
        [n, input_size], dtype of `packed`.

    Raises:
        ShapeError: an id is outside; or as `pack_rows`.

    Cost: reads a cache line for every pair of inputs (bfloat16) or input (float32).
    """
    check_tensor("ids", ids, (torch.int32, torch.int64), (-1,))
    _check_packed(packed, input_size)
    wide = ids.to(torch.int64)
    if len(wide):
        low, high = (int(bound) for bound in torch.aminmax(wide))
        if low < 0 or high >= _num_rows(packed):
            bad = low if low < 0 else high
            raise ShapeError(f"ids has {bad}, outside the {_num_rows(packed)} rows of packed", field="ids")
    return _read_rows(runtime, packed, input_size, wide, 0, len(wide))


def linear(
    runtime: NativeRuntime,
    x: torch.Tensor,
    packed: torch.Tensor,
    output_size: int,
    bias: torch.Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """X W^T + bias, summed in float32 and rounded once. A row's result does not depend on the other rows.

    Args:
        x: [num_rows, input_size] bfloat16 or float32; rows may be strided.
        packed: the weight, dtype of `x`.
        bias: [output_size], dtype of `x` or float32.
        out_dtype: dtype of `x` (if None) or float32.
        out: [num_rows, output_size] `out_dtype`, written; rows may be strided. None = a new tensor.

    Returns:
        [num_rows, output_size].

    Raises:
        ShapeError: a size, dtype, device or stride differs from the above.

    Cost: 2 * num_rows * input_size * output_size flops; reads the weight once for up to 256 rows. Bandwidth bound for
        few rows.
    Reference: kernels/reference/linear.py
    """
    return _product(runtime, x, packed, output_size, bias, out_dtype, out, is_gated=False)


def gated_linear(
    runtime: NativeRuntime,
    x: torch.Tensor,
    packed: torch.Tensor,
    intermediate_size: int,
    bias: torch.Tensor | None = None,
    *,
    activation: str = "silu",
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """activation(x G^T) * (x U^T) in one pass, with the bits of `linear` followed by `silu_and_mul`.

    Args:
        x: [num_rows, input_size] bfloat16 or float32; rows may be strided.
        packed: intermediate_size gate rows, then as many up rows; dtype of `x`.
        intermediate_size: a multiple of 16.
        bias: [2 * intermediate_size], dtype of `x` or float32.
        activation: "silu".
        out: [num_rows, intermediate_size], dtype of `x`, written; rows may be strided. None = a new tensor.

    Returns:
        [num_rows, intermediate_size], dtype of `x`.

    Raises:
        ShapeError: a size, dtype, device, stride or activation differs from the above.

    Cost: as `linear` with output_size = 2 * intermediate_size, without writing and reading its result.
    Reference: kernels/reference/linear.py, kernels/reference/activation.py
    """
    if not isinstance(activation, str) or activation != "silu":
        raise ShapeError(f"activation is {activation!r}, expected 'silu'", field="activation")
    check_size("intermediate_size", intermediate_size)
    if intermediate_size % PANEL_SIZE:
        raise ShapeError(
            f"intermediate_size is {intermediate_size}, expected a multiple of {PANEL_SIZE}",
            hint="use linear, then the activation",
            field="intermediate_size",
        )
    return _product(runtime, x, packed, intermediate_size, bias, None, out, is_gated=True)


def _product(
    runtime: NativeRuntime,
    x: torch.Tensor,
    packed: torch.Tensor,
    output_size: int,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype | None,
    out: torch.Tensor | None,
    *,
    is_gated: bool,
) -> torch.Tensor:
    check_rows("x", x)
    num_rows, input_size = x.shape
    check_size("output_size", output_size)
    num_weights = 2 * output_size if is_gated else output_size
    if input_size == 0:
        raise ShapeError("x has empty rows", field="x")
    check_tensor("packed", packed, (x.dtype,), packed_shape(num_weights, input_size, x.dtype))
    if bias is not None:
        check_tensor("bias", bias, (x.dtype, torch.float32), (num_weights,))
    if out_dtype is None:
        out_dtype = x.dtype
    elif out_dtype is not x.dtype and out_dtype is not torch.float32:
        raise ShapeError(f"out_dtype is {out_dtype}, expected {x.dtype} or torch.float32", field="out_dtype")
    if out is None:
        out = runtime.empty(num_rows, output_size, dtype=out_dtype)
    else:
        check_tensor("out", out, (out_dtype,), (num_rows, output_size), strided_rows=True)
        check_apart("out", out, x=x, packed=packed, bias=bias)
    runtime.library.linear(
        runtime.tier_idx, runtime.pool, x.data_ptr(), x.stride(0), packed.data_ptr(),
        0 if bias is None else bias.data_ptr(), out.data_ptr(), out.stride(0), num_rows, input_size, output_size,
        DTYPE_CODES[x.dtype], DTYPE_CODES[x.dtype if bias is None else bias.dtype], DTYPE_CODES[out_dtype], is_gated,
    )  # fmt: skip
    return out


def _read_rows(
    runtime: NativeRuntime,
    packed: torch.Tensor,
    input_size: int,
    ids: torch.Tensor | None,
    first_row: int,
    num_rows: int,
) -> torch.Tensor:
    out = runtime.empty(num_rows, input_size, dtype=packed.dtype)
    runtime.library.read_packed_rows(
        runtime.tier_idx, runtime.pool, packed.data_ptr(), DTYPE_CODES[packed.dtype],
        0 if ids is None else ids.data_ptr(), first_row, num_rows, input_size, out.data_ptr(),
    )  # fmt: skip
    return out


def _num_rows(packed: torch.Tensor) -> int:
    return packed.shape[0] * PANEL_SIZE


def _check_packed(packed: torch.Tensor, input_size: int) -> None:
    check_size("input_size", input_size)
    check_is_tensor("packed", packed)
    check_tensor("packed", packed, FLOATS, (-1, *packed_shape(1, input_size, packed.dtype)[1:]))


def _check_range(packed: torch.Tensor, first_row: int, num_rows: int) -> None:
    check_size("first_row", first_row)
    check_size("num_rows", num_rows)
    if first_row + num_rows > _num_rows(packed):
        raise ShapeError(
            f"rows {first_row} to {first_row + num_rows - 1} are outside the {_num_rows(packed)} rows of packed",
            field="first_row",
        )
