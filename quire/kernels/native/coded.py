"""Linear layers on weights kept as codes of 4 or 8 bits with scales: packing, products, lookups. Called by layers.

Codes become bfloat16 numbers in cache, inside the product, so that activations are not quantised; the sums of a group
of inputs are multiplied by its scale. Stateless. Layouts: csrc/include/quire/coded.h.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from quire.errors import ShapeError
from quire.kernels.native.checks import (
    DTYPE_CODES,
    FLOATS,
    check_apart,
    check_is_tensor,
    check_size,
    check_tensor,
)
from quire.kernels.native.runtime import NativeRuntime

PANEL_SIZE = 16
TILE_DEPTH = 32
_MAX_ROWS = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Code:
    """What codes stand for.

    Attributes:
        name: "fp8" (e4m3), "int8", "int4" (0 .. 15, less a zero point) or "nf4".
        number: `Code` in csrc/include/quire/coded.h.
        num_bits: 4 or 8.
        dtype: of the rows of codes; of 4 bits, two lie in a byte, the first one in the lower half.
    """

    name: str
    number: int
    num_bits: int
    dtype: torch.dtype

    @property
    def has_zeros(self) -> bool:
        """Whether each output and group has a zero point."""
        return self.name == "int4"


CODES: Mapping[str, Code] = {
    code.name: code
    for code in (
        Code("fp8", 0, 8, torch.float8_e4m3fn), Code("int8", 1, 8, torch.int8), Code("int4", 2, 4, torch.uint8),
        Code("nf4", 3, 4, torch.uint8),
    )
}  # fmt: skip
"""By name, which is that of the `WeightFormat`."""

Allocate = Callable[[Sequence[int], torch.dtype], torch.Tensor]


@dataclass(frozen=True, slots=True)
class CodedWeight:
    """A packed weight.

    Attributes:
        packed: uint8 [panels, tiles, bytes of a tile].
        scales: float32 [panels, num_groups, 16].
        zeros: uint8, likewise; None where codes have none.
        input_size: without padding.
        group_size: inputs that share a scale, a multiple of 32; 0 = all.
    """

    code: Code
    packed: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    input_size: int
    group_size: int

    @property
    def num_outputs(self) -> int:
        """Up to a whole panel."""
        return self.packed.shape[0] * PANEL_SIZE


def make_weight(code: Code, output_size: int, input_size: int, group_size: int, allocate: Allocate) -> CodedWeight:
    """A weight for so many outputs.

    Args:
        allocate: makes tensors of zeros.

    Raises:
        ShapeError: groups are not a multiple of 32.
    """
    check_size("output_size", output_size)
    check_size("input_size", input_size, 1)
    if group_size < 0 or group_size % TILE_DEPTH:
        raise ShapeError(
            f"groups have {group_size} inputs, expected a multiple of {TILE_DEPTH}, or 0", field="group_size"
        )
    panels, groups = -(-output_size // PANEL_SIZE), -(-input_size // group_size) if group_size else 1
    packed = allocate(_packed_shape(code, panels, input_size), torch.uint8)
    scales = allocate((panels, groups, PANEL_SIZE), torch.float32)
    zeros = allocate((panels, groups, PANEL_SIZE), torch.uint8) if code.has_zeros else None
    return CodedWeight(code, packed, scales, zeros, input_size, group_size)


def pack_rows(
    runtime: NativeRuntime,
    weight: CodedWeight,
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    first_row: int,
) -> bool:
    """Write rows of codes as outputs first_row, first_row + 1, ... of a weight, in place.

    Args:
        codes: [num_rows, input_size], or [num_rows, ceil(input_size / 2)] of 4 bits; dtype of the code.
        scales: [num_rows, num_groups] float32.
        zeros: [num_rows, num_groups] uint8 below 16, of codes that have zero points.

    Returns:
        Whether every number is finite.

    Raises:
        ShapeError: a size, dtype, device or stride differs from the above, or rows lie outside of the weight.

    Cost: reads the codes and writes them; bandwidth bound.
    """
    _check_weight(weight)
    code, input_size = weight.code, weight.input_size
    width = input_size if code.num_bits == 8 else -(-input_size // 2)
    check_tensor("codes", codes, (code.dtype,), (-1, width), strided_rows=True)
    num_rows, groups = len(codes), weight.scales.shape[1]
    check_tensor("scales", scales, (torch.float32,), (num_rows, groups))
    _check_has_zeros(code, zeros)
    if zeros is not None:
        check_tensor("zeros", zeros, (torch.uint8,), (num_rows, groups))
        if zeros.numel() and int(zeros.max()) > 15:
            raise ShapeError(f"zeros has {int(zeros.max())}, expected 0 .. 15", field="zeros")
    check_size("first_row", first_row)
    given = {"codes": codes, "scales": scales, "zeros": zeros}
    check_apart("packed", weight.packed, **given, packed_scales=weight.scales, packed_zeros=weight.zeros)
    check_apart("packed_scales", weight.scales, **given, packed_zeros=weight.zeros)
    if weight.zeros is not None:
        check_apart("packed_zeros", weight.zeros, **given)
    if first_row + num_rows > weight.num_outputs:
        raise ShapeError(
            f"rows {first_row} .. {first_row + num_rows} do not fit into a weight of {weight.num_outputs} outputs",
            field="first_row",
        )
    is_finite: bool = runtime.library.pack_codes(
        runtime.tier_idx, runtime.pool, codes.data_ptr(), codes.stride(0), scales.data_ptr(),
        _address(zeros), weight.packed.data_ptr(), weight.scales.data_ptr(),
        _address(weight.zeros), first_row, num_rows, input_size, groups, code.number,
    )  # fmt: skip
    return is_finite


def gather_rows(runtime: NativeRuntime, ids: torch.Tensor, weight: CodedWeight, dtype: torch.dtype) -> torch.Tensor:
    """The numbers of some outputs.

    Args:
        ids: [num_ids] int32 or int64; 0 <= id < number of outputs, up to a whole panel.
        dtype: bfloat16 or float32.

    Returns:
        [num_ids, input_size] of `dtype`: value of the code * scale in float32, rounded. Inputs are in the order of the
        columns.

    Raises:
        ShapeError: a size, dtype, device or stride differs from the above, or an id is out of range.
    """
    _check_weight(weight)
    check_tensor("ids", ids, (torch.int64, torch.int32), (-1,))
    if not isinstance(dtype, torch.dtype) or dtype not in FLOATS:
        raise ShapeError(f"dtype is {dtype}, expected torch.bfloat16 or torch.float32", field="dtype")
    out = runtime.empty(ids.shape[0], weight.input_size, dtype=dtype)
    if not out.numel():
        return out
    low, high = (int(value) for value in torch.aminmax(ids))
    if low < 0 or high >= weight.num_outputs:
        raise ShapeError(f"ids are {low} .. {high}, expected 0 .. {weight.num_outputs - 1}", field="ids")
    wide_ids = ids.long()
    runtime.library.gather_codes(
        runtime.tier_idx, runtime.pool, wide_ids.data_ptr(), weight.packed.data_ptr(), weight.scales.data_ptr(),
        _address(weight.zeros), out.data_ptr(), ids.shape[0], weight.input_size, weight.group_size,
        DTYPE_CODES[dtype], weight.code.number,
    )  # fmt: skip
    return out


def linear(
    runtime: NativeRuntime,
    x: torch.Tensor,
    weight: CodedWeight,
    output_size: int,
    bias: torch.Tensor | None = None,
    *,
    order: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
    is_gated: bool = False,
) -> torch.Tensor:
    """X W^T + bias: the chains of the bfloat16 product over the values of codes, times the scale of each group.

    Args:
        x: [num_rows, input_size] bfloat16; rows may be strided.
        bias: [output_size], or twice as many where gated; bfloat16 or float32.
        order: [input_size] int32: column i of the weight belongs to input order[i]; None = in order.
        out_dtype: bfloat16 (if None) or float32.
        out: [num_rows, output_size] `out_dtype`, written; rows may be strided. None = a new tensor.
        is_gated: silu(gate) * up of a weight of output_size gates, then as many ups; a multiple of 16.

    Returns:
        [num_rows, output_size]. A row depends on no other row, nor on the tier or the number of threads.

    Raises:
        ShapeError: a size, dtype, device, stride or index differs from the above.

    Cost: reads the codes once for up to 256 rows; bandwidth bound for few rows.
    Reference: kernels/reference/coded.py
    """
    num_rows = _check_product(x, weight, output_size, bias, order, 1, is_gated=is_gated)
    dtype = torch.bfloat16 if out_dtype is None else out_dtype
    if dtype not in FLOATS:
        raise ShapeError(f"out_dtype is {dtype}, expected torch.bfloat16 or torch.float32", field="out_dtype")
    if out is None:
        out = runtime.empty(num_rows, output_size, dtype=dtype)
    else:
        check_tensor("out", out, (dtype,), (num_rows, output_size), strided_rows=True)
        check_apart("out", out, x=x, packed=weight.packed, bias=bias)
    _refuse(
        runtime.library.linear_coded(
            runtime.tier_idx, runtime.pool, x.data_ptr(), x.stride(0), weight.packed.data_ptr(),
            weight.scales.data_ptr(), _address(weight.zeros), _address(order), _address(bias), out.data_ptr(),
            out.stride(0), num_rows, output_size, weight.input_size, weight.group_size, weight.code.number,
            DTYPE_CODES[torch.bfloat16 if bias is None else bias.dtype], DTYPE_CODES[dtype], is_gated,
        )
    )  # fmt: skip
    return out


def grouped_linear(
    runtime: NativeRuntime,
    x: torch.Tensor,
    rows: torch.Tensor | None,
    starts: torch.Tensor,
    weight: CodedWeight,
    output_size: int,
    bias: torch.Tensor | None = None,
    *,
    order: torch.Tensor | None = None,
    is_gated: bool = False,
) -> torch.Tensor:
    """Every expert's product with its own rows, in one call, as `experts.grouped_linear`.

    Args:
        x: [any, input_size] bfloat16; rows may be strided.
        rows: [num_rows] int32, each a row of `x`; None = row i is x[i].
        starts: [num_experts + 1] int32, from 0 to num_rows, rising.
        weight: of all experts, each from a panel of 16 on.
        bias: [num_experts, output_size] (twice as many where gated), bfloat16 or float32.
        order: [num_experts, input_size] int32.

    Returns:
        [num_rows, output_size] bfloat16. A row has the bits of `linear` with its expert's weight.

    Raises:
        ShapeError: a size, dtype, device, stride or index differs from the above.

    Cost: as `linear`, for the weights of the experts that have rows.
    Reference: kernels/reference/coded.py
    """
    check_tensor("starts", starts, (torch.int32,), (-1,))
    num_experts = len(starts) - 1
    check_size("num_experts", num_experts)
    num_x_rows = _check_product(x, weight, output_size, bias, order, num_experts, is_gated=is_gated, is_grouped=True)
    num_rows = num_x_rows
    if rows is not None:
        check_tensor("rows", rows, (torch.int32,), (-1,))
        num_rows = len(rows)
    check_size("num_rows", num_rows, 0, _MAX_ROWS)
    out = runtime.empty(num_rows, output_size, dtype=torch.bfloat16)
    _refuse(
        runtime.library.grouped_coded(
            runtime.tier_idx, runtime.pool, x.data_ptr(), x.stride(0), _address(rows), num_x_rows, starts.data_ptr(),
            num_experts, weight.packed.data_ptr(), weight.scales.data_ptr(), _address(weight.zeros), _address(order),
            _address(bias), out.data_ptr(), num_rows, output_size, weight.input_size, weight.group_size,
            weight.code.number, DTYPE_CODES[torch.bfloat16 if bias is None else bias.dtype],
            DTYPE_CODES[torch.bfloat16], is_gated,
        )
    )  # fmt: skip
    return out


def _check_product(
    x: torch.Tensor, weight: CodedWeight, output_size: int, bias: torch.Tensor | None, order: torch.Tensor | None,
    num_experts: int, *, is_gated: bool, is_grouped: bool = False,
) -> int:  # fmt: skip
    """The rows of x."""
    _check_weight(weight)
    check_size("output_size", output_size)
    if not isinstance(is_gated, bool):
        raise ShapeError(f"is_gated is {is_gated!r}, expected a bool", field="is_gated")
    if is_gated and output_size % PANEL_SIZE:
        raise ShapeError(
            f"output_size is {output_size}, expected a multiple of {PANEL_SIZE}",
            hint="use the product, then the activation",
            field="output_size",
        )
    num_weights = 2 * output_size if is_gated else output_size
    num_panels = num_experts * -(-num_weights // PANEL_SIZE)
    if weight.packed.shape[0] != num_panels:
        raise ShapeError(f"packed has {weight.packed.shape[0]} panels, expected {num_panels}", field="packed")
    check_tensor("x", x, (torch.bfloat16,), (-1, weight.input_size), strided_rows=True)
    experts = (num_experts,) if is_grouped else ()
    if bias is not None:
        check_tensor("bias", bias, FLOATS, (*experts, num_weights))
    if order is not None:
        check_tensor("order", order, (torch.int32,), (*experts, weight.input_size))
    return x.shape[0]


def _packed_shape(code: Code, panels: int, input_size: int) -> tuple[int, int, int]:
    return (panels, -(-input_size // TILE_DEPTH), PANEL_SIZE * TILE_DEPTH * code.num_bits // 8)


def _check_weight(weight: CodedWeight) -> None:
    check_size("input_size", weight.input_size, 1)
    check_size("group_size", weight.group_size)
    if weight.group_size % TILE_DEPTH:
        raise ShapeError(f"group_size is {weight.group_size}, expected a multiple of {TILE_DEPTH}", field="group_size")
    check_is_tensor("packed", weight.packed)
    panels = weight.packed.shape[0] if weight.packed.dim() else 0
    groups = -(-weight.input_size // weight.group_size) if weight.group_size else 1
    check_tensor("packed", weight.packed, (torch.uint8,), _packed_shape(weight.code, panels, weight.input_size))
    check_tensor("scales", weight.scales, (torch.float32,), (panels, groups, PANEL_SIZE))
    _check_has_zeros(weight.code, weight.zeros)
    if weight.zeros is not None:
        check_tensor("zeros", weight.zeros, (torch.uint8,), (panels, groups, PANEL_SIZE))


def _check_has_zeros(code: Code, zeros: object) -> None:
    if (zeros is not None) != code.has_zeros:
        wanted = "zero points" if code.has_zeros else "None: it has no zero points"
        raise ShapeError(f"zeros is {type(zeros).__name__}, {code.name} needs {wanted}", field="zeros")


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _refuse(fault: str | None) -> None:
    if fault is not None:
        raise ShapeError(fault, field=fault.split()[0])
