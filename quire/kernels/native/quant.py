"""Linear layers and embeddings on int8 and int4 weights: packing, products, lookups. Called by layers; stateless.

int8: one scale per output. int4: one scale per output and group of inputs, values -8 .. 7. In both, activations are
quantised to int8 row by row inside the product, whose sums are exact integers. Layouts: csrc/include/quire/quant.h.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from quire.errors import ShapeError
from quire.kernels.native.checks import DTYPE_CODES, check_apart, check_is_tensor, check_size, check_tensor
from quire.kernels.native.runtime import NativeRuntime

FLOATS = (torch.bfloat16, torch.float32)
PACKED_DTYPE = torch.int8
INT8_SCALE_DTYPE = torch.float32
INT4_SCALE_DTYPE = torch.bfloat16
PANEL_SIZE = 16
# Sums of products of this many values stay below 2 ** 31, and sums of quantised activations below 2 ** 24.
MAX_INPUT_SIZE = 131072
# Rows of a weight whose dtype the kernels do not read are converted so many at a time.
ROWS_PER_CONVERSION = 1024


def int8_packed_shape(output_size: int, input_size: int) -> tuple[int, ...]:
    """Shape of the packed int8 weight (`PACKED_DTYPE`) of an [output_size, input_size] matrix."""
    return (_ceil_div(output_size, PANEL_SIZE), _ceil_div(input_size, 64), 16, PANEL_SIZE, 4)


def int8_scales_shape(output_size: int) -> tuple[int, ...]:
    """Shape of the scales (`INT8_SCALE_DTYPE`): one per output, up to a whole panel."""
    return (_ceil_div(output_size, PANEL_SIZE) * PANEL_SIZE,)


def int4_group_size(input_size: int) -> int:
    """Inputs that share a scale: the largest of 128, 64, 32 that divides `input_size` rounded up to 32."""
    num_units = _ceil_div(input_size, 32)
    return 128 if num_units % 4 == 0 else 64 if num_units % 2 == 0 else 32


def int4_packed_shape(output_size: int, input_size: int) -> tuple[int, ...]:
    """Shape of the packed int4 weight (`PACKED_DTYPE`, two values a byte) of an [output_size, input_size] matrix."""
    return (_ceil_div(output_size, PANEL_SIZE), _ceil_div(input_size, 32), 4, PANEL_SIZE, 4)


def int4_scales_shape(output_size: int, input_size: int) -> tuple[int, ...]:
    """Shape of the scales (`INT4_SCALE_DTYPE`)."""
    num_groups = _ceil_div(input_size, int4_group_size(input_size))
    return (_ceil_div(output_size, PANEL_SIZE), num_groups, PANEL_SIZE)


def pack_int8_rows(
    runtime: NativeRuntime, rows: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, first_row: int
) -> bool:
    """Quantise rows of a weight to int8 and write them as outputs first_row, first_row + 1, ... of `packed`.

    Args:
        rows: [num_rows, input_size] bfloat16, float16 or float32; rows may be strided.
        packed, scales: `int8_packed_shape`, `int8_scales_shape`; mutated for these outputs alone.

    Returns:
        Whether every number was finite; outputs with one that is not get a NaN scale.

    Raises:
        ShapeError: a size, dtype, device or stride differs from the above.

    Cost: reads the rows, writes half of their bytes (from bfloat16).
    Reference: kernels/reference/quant.py
    """
    num_outputs, input_size = _check_int8(packed, scales, _row_size("rows", rows))
    pack = runtime.library.pack_int8
    return _pack(pack, runtime, rows, packed, scales, first_row, (num_outputs, input_size, 0))


def pack_int4_rows(
    runtime: NativeRuntime, rows: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, first_row: int
) -> bool:
    """Quantise rows of a weight to int4 and write them as outputs first_row, first_row + 1, ... of `packed`.

    A group's scale is the one of 14 candidates that leaves the least squared error.

    Args:
        rows: [num_rows, input_size] bfloat16, float16 or float32; rows may be strided.
        packed, scales: `int4_packed_shape`, `int4_scales_shape`; mutated for these outputs alone.

    Returns:
        Whether every number was finite; groups with one that is not get a NaN scale.

    Raises:
        ShapeError: a size, dtype, device or stride differs from the above.

    Cost: about 10 vector operations per candidate and 16 weights.
    Reference: kernels/reference/quant.py
    """
    num_outputs, input_size = _check_int4(packed, scales, _row_size("rows", rows))
    pack = runtime.library.pack_int4
    sizes = (num_outputs, input_size, int4_group_size(input_size))
    return _pack(pack, runtime, rows, packed, scales, first_row, sizes)


def linear_int8(
    runtime: NativeRuntime,
    x: torch.Tensor,
    packed: torch.Tensor,
    scales: torch.Tensor,
    output_size: int,
    bias: torch.Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Compute x W^T + bias, with int8 weights and rows of `x` quantised to int8 by their largest magnitude.

    A row with NaN or infinity gives NaN in its own outputs alone. Rows whose largest magnitude is below 2 ** -96
    count as zero.

    Args:
        x: [num_tokens, input_size] bfloat16 or float32; rows may be strided.
        packed, scales: as `pack_int8_rows` wrote them.
        bias: [output_size] float32 or the dtype of `x`.
        out_dtype: float32 or the dtype of `x`; None = the latter.

    Returns:
        [num_tokens, output_size]. A row depends on no other row, nor on the tier or the number of threads.

    Raises:
        ShapeError: a size, dtype, device or stride differs from the above.

    Cost: reads output_size * input_size bytes of weights: bandwidth bound up to about 8 tokens.
    Reference: kernels/reference/quant.py
    """
    if not isinstance(output_size, int) or output_size < 0:
        check_size("output_size", output_size)
    _check("packed", packed, PACKED_DTYPE, int8_packed_shape(output_size, _row_size("x", x)))
    _check("scales", scales, INT8_SCALE_DTYPE, int8_scales_shape(output_size))
    return _linear(runtime.library.linear_int8, runtime, x, packed, scales, output_size, 0, bias, out_dtype)


def linear_int4(
    runtime: NativeRuntime,
    x: torch.Tensor,
    packed: torch.Tensor,
    scales: torch.Tensor,
    output_size: int,
    bias: torch.Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Compute x W^T + bias, with int4 weights and rows of `x` quantised to int8 by their largest magnitude.

    A row with NaN or infinity gives NaN in its own outputs alone. Rows whose largest magnitude is below 2 ** -96
    count as zero. Sums are exact within a group and float32 over the groups, in their order.

    Args:
        x: [num_tokens, input_size] bfloat16 or float32; rows may be strided.
        packed, scales: as `pack_int4_rows` wrote them.
        bias: [output_size] float32 or the dtype of `x`.
        out_dtype: float32 or the dtype of `x`; None = the latter.

    Returns:
        [num_tokens, output_size]. A row depends on no other row, nor on the tier or the number of threads.

    Raises:
        ShapeError: a size, dtype, device or stride differs from the above.

    Cost: reads output_size * input_size / 2 bytes of weights: bandwidth bound up to about 4 tokens.
    Reference: kernels/reference/quant.py
    """
    if not isinstance(output_size, int) or output_size < 0:
        check_size("output_size", output_size)
    input_size = _row_size("x", x)
    group_size = int4_group_size(input_size)
    _check("packed", packed, PACKED_DTYPE, int4_packed_shape(output_size, input_size))
    _check("scales", scales, INT4_SCALE_DTYPE, int4_scales_shape(output_size, input_size))
    return _linear(runtime.library.linear_int4, runtime, x, packed, scales, output_size, group_size, bias, out_dtype)


def gather_int8_rows(
    runtime: NativeRuntime,
    ids: torch.Tensor,
    packed: torch.Tensor,
    scales: torch.Tensor,
    input_size: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """The dequantised weights of some outputs: an embedding lookup.

    Args:
        ids: [num_ids] int32 or int64; 0 <= id < number of scales.
        dtype: bfloat16 or float32.

    Returns:
        [num_ids, input_size] of `dtype`: q * scale in float32, rounded.

    Raises:
        ShapeError: a size, dtype, device or stride differs from the above, or an id is out of range.

    Cost: reads 16 bytes for each byte used; latency bound.
    Reference: kernels/reference/quant.py
    """
    num_outputs, _ = _check_int8(packed, scales, input_size)
    gather = runtime.library.gather_int8
    return _gather(gather, runtime, ids, packed, scales, (num_outputs, input_size, 0), dtype)


def gather_int4_rows(
    runtime: NativeRuntime,
    ids: torch.Tensor,
    packed: torch.Tensor,
    scales: torch.Tensor,
    input_size: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """The dequantised weights of some outputs: an embedding lookup.

    Args:
        ids: [num_ids] int32 or int64; 0 <= id < number of outputs, up to a whole panel.
        dtype: bfloat16 or float32.

    Returns:
        [num_ids, input_size] of `dtype`: q * scale in float32, rounded.

    Raises:
        ShapeError: a size, dtype, device or stride differs from the above, or an id is out of range.

    Cost: reads 16 bytes for each byte used; latency bound.
    Reference: kernels/reference/quant.py
    """
    num_outputs, _ = _check_int4(packed, scales, input_size)
    gather = runtime.library.gather_int4
    sizes = (num_outputs, input_size, int4_group_size(input_size))
    return _gather(gather, runtime, ids, packed, scales, sizes, dtype)


def unpack_int8_rows(
    runtime: NativeRuntime, packed: torch.Tensor, scales: torch.Tensor, first_row: int, num_rows: int, input_size: int
) -> torch.Tensor:
    """Dequantised weights of outputs first_row .. first_row + num_rows - 1: [num_rows, input_size] float32."""
    ids = _row_ids(packed, first_row, num_rows)
    return gather_int8_rows(runtime, ids, packed, scales, input_size, torch.float32)


def unpack_int4_rows(
    runtime: NativeRuntime, packed: torch.Tensor, scales: torch.Tensor, first_row: int, num_rows: int, input_size: int
) -> torch.Tensor:
    """Dequantised weights of outputs first_row .. first_row + num_rows - 1: [num_rows, input_size] float32."""
    ids = _row_ids(packed, first_row, num_rows)
    return gather_int4_rows(runtime, ids, packed, scales, input_size, torch.float32)


def weight_error(original_rows: torch.Tensor, unpacked_rows: torch.Tensor) -> float:
    """Root mean square of the difference over that of the original; 0.0 for weights that are all zero."""
    original = original_rows.double()
    norm = original.norm().item()
    return (unpacked_rows.double() - original).norm().item() / norm if norm else 0.0


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def _row_size(name: str, rows: torch.Tensor) -> int:
    """The elements of a row of a matrix."""
    if not isinstance(rows, torch.Tensor) or rows.dim() != 2 or rows.layout is not torch.strided:
        check_tensor(name, rows, FLOATS, (-1, -1))
    return rows.shape[1]


def _row_ids(packed: torch.Tensor, first_row: int, num_rows: int) -> torch.Tensor:
    """The numbers of outputs that follow each other."""
    num_outputs = _num_outputs(packed)
    check_size("first_row", first_row, 0, num_outputs)
    check_size("num_rows", num_rows, 0, num_outputs - first_row)
    return torch.arange(first_row, first_row + num_rows)


def _num_outputs(packed: torch.Tensor) -> int:
    """The outputs that `packed` has room for."""
    check_is_tensor("packed", packed)
    if packed.dim() != 5:
        check_tensor("packed", packed, (PACKED_DTYPE,), (-1,) * 5)
    return packed.shape[0] * PANEL_SIZE


def _check_input_size(input_size: int) -> None:
    if not isinstance(input_size, int) or not 1 <= input_size <= MAX_INPUT_SIZE:
        raise ShapeError(
            f"quantised weights have {input_size!r} inputs, expected 1 .. {MAX_INPUT_SIZE}", field="input_size"
        )


def _check(name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """`check_tensor` for the common case: a product of one row takes microseconds, and so would three checks."""
    if not isinstance(tensor, torch.Tensor) or tensor.dtype is not dtype or tensor.shape != shape:
        check_tensor(name, tensor, (dtype,), shape)
    if not (tensor.is_cpu and tensor.is_contiguous()) or (
        dtype is not PACKED_DTYPE and tensor.data_ptr() % dtype.itemsize
    ):
        check_tensor(name, tensor, (dtype,), shape)


def _check_int8(packed: torch.Tensor, scales: torch.Tensor, input_size: int) -> tuple[int, int]:
    """The outputs that `packed` has room for, and `input_size`."""
    _check_input_size(input_size)
    num_outputs = _num_outputs(packed)
    _check("packed", packed, PACKED_DTYPE, int8_packed_shape(num_outputs, input_size))
    _check("scales", scales, INT8_SCALE_DTYPE, int8_scales_shape(num_outputs))
    return num_outputs, input_size


def _check_int4(packed: torch.Tensor, scales: torch.Tensor, input_size: int) -> tuple[int, int]:
    """The outputs that `packed` has room for, and `input_size`."""
    _check_input_size(input_size)
    num_outputs = _num_outputs(packed)
    _check("packed", packed, PACKED_DTYPE, int4_packed_shape(num_outputs, input_size))
    _check("scales", scales, INT4_SCALE_DTYPE, int4_scales_shape(num_outputs, input_size))
    return num_outputs, input_size


def _pack(
    pack: Callable[..., bool],
    runtime: NativeRuntime,
    rows: torch.Tensor,
    packed: torch.Tensor,
    scales: torch.Tensor,
    first_row: int,
    sizes: tuple[int, int, int],
) -> bool:
    num_outputs, input_size, group_size = sizes
    check_tensor("rows", rows, (*FLOATS, torch.float16), (-1, input_size), strided_rows=True)
    num_rows = rows.shape[0]
    check_size("first_row", first_row)
    check_apart("packed", packed, rows=rows, scales=scales)
    check_apart("scales", scales, rows=rows)
    if first_row + num_rows > num_outputs:
        raise ShapeError(
            f"rows {first_row} .. {first_row + num_rows} do not fit into a packed weight of {num_outputs} outputs",
            field="first_row",
        )
    step = num_rows if rows.dtype in FLOATS else ROWS_PER_CONVERSION
    all_finite = True
    for start in range(0, num_rows, max(step, 1)):
        part = rows[start : start + step]
        readable = part if part.dtype in FLOATS else part.float()
        is_finite = pack(
            runtime.tier_idx, runtime.pool, readable.data_ptr(), readable.stride(0), packed.data_ptr(),
            scales.data_ptr(), first_row + start, readable.shape[0], input_size, group_size,
            DTYPE_CODES[readable.dtype],
        )  # fmt: skip
        all_finite = all_finite and is_finite
    return all_finite


def _linear(
    linear: Callable[..., None],
    runtime: NativeRuntime,
    x: torch.Tensor,
    packed: torch.Tensor,
    scales: torch.Tensor,
    output_size: int,
    group_size: int,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype | None,
) -> torch.Tensor:
    x_dtype = x.dtype
    if x.dim() != 2 or x_dtype not in FLOATS or not (x.is_cpu and x.is_contiguous()) or x.data_ptr() % x.itemsize:
        check_tensor("x", x, FLOATS, (-1, -1), strided_rows=True)
    num_tokens, input_size = x.shape
    _check_input_size(input_size)
    bias_ptr, bias_dtype = 0, torch.float32
    if bias is not None:
        bias_dtype = x_dtype if isinstance(bias, torch.Tensor) and bias.dtype is x_dtype else torch.float32
        _check("bias", bias, bias_dtype, (output_size,))
        bias_ptr = bias.data_ptr()
    out_dtype = x_dtype if out_dtype is None else out_dtype
    if out_dtype is not x_dtype and out_dtype is not torch.float32:
        raise ShapeError(f"out_dtype is {out_dtype}, expected {x_dtype} or torch.float32", field="out_dtype")
    out = torch.empty((num_tokens, output_size), dtype=out_dtype)
    if num_tokens and output_size:
        linear(
            runtime.tier_idx, runtime.pool, x.data_ptr(), x.stride(0), packed.data_ptr(), scales.data_ptr(), bias_ptr,
            out.data_ptr(), num_tokens, output_size, input_size, group_size, DTYPE_CODES[x_dtype],
            DTYPE_CODES[bias_dtype], DTYPE_CODES[out_dtype],
        )  # fmt: skip
    return out


def _gather(
    gather: Callable[..., None],
    runtime: NativeRuntime,
    ids: torch.Tensor,
    packed: torch.Tensor,
    scales: torch.Tensor,
    sizes: tuple[int, int, int],
    dtype: torch.dtype,
) -> torch.Tensor:
    num_outputs, input_size, group_size = sizes
    check_tensor("ids", ids, (torch.int64, torch.int32), (-1,))
    if not isinstance(dtype, torch.dtype) or dtype not in FLOATS:
        raise ShapeError(f"dtype is {dtype}, expected torch.bfloat16 or torch.float32", field="dtype")
    out = torch.empty(ids.shape[0], input_size, dtype=dtype)
    if not out.numel():
        return out
    low, high = (int(value) for value in torch.aminmax(ids))
    if low < 0 or high >= num_outputs:
        raise ShapeError(f"ids are {low} .. {high}, expected 0 .. {num_outputs - 1}", field="ids")
    wide_ids = ids.long()
    gather(
        runtime.tier_idx, runtime.pool, wide_ids.data_ptr(), packed.data_ptr(), scales.data_ptr(), out.data_ptr(),
        ids.shape[0], input_size, group_size, DTYPE_CODES[dtype],
    )  # fmt: skip
    return out
