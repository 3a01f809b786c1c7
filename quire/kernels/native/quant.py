"""Linear layers and embeddings on int8 and int4 weights: packing, products, lookups. Called by layers; stateless.

`INT8`: one scale per output. `INT4`: one scale per output and group of inputs, values -8 .. 7. In both, activations
are quantised to int8 row by row inside the product, whose sums are exact integers. Layouts: csrc/include/quire/quant.h.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

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

PACKED_DTYPE = torch.int8
PANEL_SIZE = 16
# Sums of products of this many values stay below 2 ** 31, and sums of quantised activations below 2 ** 24.
MAX_INPUT_SIZE = 131072
# Rows of a weight whose dtype the kernels do not read are converted so many at a time.
ROWS_PER_CONVERSION = 1024


class QuantFormat(ABC):
    """How an [output_size, input_size] matrix is stored as integers and scales, and multiplied.

    Attributes:
        name: "int8" or "int4"; the library's functions end in it.
        scale_dtype: of the scales; packed weights are `PACKED_DTYPE`.
    """

    name: ClassVar[str]
    scale_dtype: ClassVar[torch.dtype]

    @abstractmethod
    def group_size(self, input_size: int) -> int:
        """Inputs that share a scale; 0 = all."""

    @abstractmethod
    def packed_shape(self, output_size: int, input_size: int) -> tuple[int, ...]:
        """Shape of the packed weight, up to whole panels of outputs and tiles of inputs."""

    @abstractmethod
    def scales_shape(self, output_size: int, input_size: int) -> tuple[int, ...]:
        """Shape of the scales, up to a whole panel of outputs."""

    def pack_rows(
        self, runtime: NativeRuntime, rows: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, first_row: int
    ) -> bool:
        """Quantise rows of a weight and write them as outputs first_row, first_row + 1, ... of `packed`, in place.

        Args:
            rows: [num_rows, input_size] bfloat16, float16 or float32; rows may be strided.
            packed, scales: of `packed_shape` and `scales_shape`; mutated for these outputs alone.

        Returns:
            Whether every number was finite; a scale is NaN where one of its numbers is not.

        Raises:
            ShapeError: a size, dtype, device or stride differs from the above, or the rows lie outside `packed`.

        Cost: int8 reads the rows and writes half of their bytes (from bfloat16); int4 takes about 10 vector operations
            for each of a group's 14 candidate scales and 16 weights.
        Reference: kernels/reference/quant.py
        """
        check_tensor("rows", rows, (*FLOATS, torch.float16), (-1, -1), strided_rows=True)
        num_rows, input_size = rows.shape
        num_outputs = self._check_weight(packed, scales, input_size)
        check_size("first_row", first_row)
        check_apart("packed", packed, rows=rows, scales=scales)
        check_apart("scales", scales, rows=rows)
        if first_row + num_rows > num_outputs:
            raise ShapeError(
                f"rows {first_row} .. {first_row + num_rows} do not fit into a packed weight of {num_outputs} outputs",
                field="first_row",
            )
        pack = getattr(runtime.library, f"pack_{self.name}")
        step = num_rows if rows.dtype in FLOATS else ROWS_PER_CONVERSION
        all_finite = True
        for start in range(0, num_rows, max(step, 1)):
            part = rows[start : start + step]
            readable = part if part.dtype in FLOATS else part.float()
            is_finite = pack(
                runtime.tier_idx, runtime.pool, readable.data_ptr(), readable.stride(0), packed.data_ptr(),
                scales.data_ptr(), first_row + start, readable.shape[0], input_size, self.group_size(input_size),
                DTYPE_CODES[readable.dtype],
            )  # fmt: skip
            all_finite = all_finite and is_finite
        return all_finite

    def unpack_rows(
        self, runtime: NativeRuntime, packed: torch.Tensor, scales: torch.Tensor, input_size: int,
        first_row: int, num_rows: int,
    ) -> torch.Tensor:  # fmt: skip
        """Dequantised weights of outputs first_row .. first_row + num_rows - 1: [num_rows, input_size] float32."""
        num_outputs = _num_outputs(packed)
        check_size("first_row", first_row, 0, num_outputs)
        check_size("num_rows", num_rows, 0, num_outputs - first_row)
        ids = torch.arange(first_row, first_row + num_rows)
        return self.gather_rows(runtime, ids, packed, scales, input_size, torch.float32)

    def gather_rows(
        self, runtime: NativeRuntime, ids: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, input_size: int,
        dtype: torch.dtype,
    ) -> torch.Tensor:  # fmt: skip
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
        num_outputs = self._check_weight(packed, scales, input_size)
        check_tensor("ids", ids, (torch.int64, torch.int32), (-1,))
        if not isinstance(dtype, torch.dtype) or dtype not in FLOATS:
            raise ShapeError(f"dtype is {dtype}, expected torch.bfloat16 or torch.float32", field="dtype")
        out = runtime.empty(ids.shape[0], input_size, dtype=dtype)
        if not out.numel():
            return out
        low, high = (int(value) for value in torch.aminmax(ids))
        if low < 0 or high >= num_outputs:
            raise ShapeError(f"ids are {low} .. {high}, expected 0 .. {num_outputs - 1}", field="ids")
        wide_ids = ids.long()
        gather = getattr(runtime.library, f"gather_{self.name}")
        gather(
            runtime.tier_idx, runtime.pool, wide_ids.data_ptr(), packed.data_ptr(), scales.data_ptr(), out.data_ptr(),
            ids.shape[0], input_size, self.group_size(input_size), DTYPE_CODES[dtype],
        )  # fmt: skip
        return out

    def linear(
        self,
        runtime: NativeRuntime,
        x: torch.Tensor,
        packed: torch.Tensor,
        scales: torch.Tensor,
        output_size: int,
        bias: torch.Tensor | None = None,
        *,
        out_dtype: torch.dtype | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute x W^T + bias, with rows of `x` quantised to int8 by their largest magnitude.

        A row with NaN or infinity gives NaN in its own outputs alone. Rows whose largest magnitude is below 2 ** -96
        count as zero. Sums are exact within a group of inputs and float32 over the groups, in their order.

        Args:
            x: [num_tokens, input_size] bfloat16 or float32; rows may be strided.
            packed, scales: as `pack_rows` wrote them.
            bias: [output_size] float32 or the dtype of `x`.
            out_dtype: float32 or the dtype of `x`; None = the latter.
            out: [num_tokens, output_size] `out_dtype`, written; rows may be strided. None = a new tensor.

        Returns:
            [num_tokens, output_size]. A row depends on no other row, nor on the tier or the number of threads.

        Raises:
            ShapeError: a size, dtype, device or stride differs from the above.

        Cost: reads the packed weight once: bandwidth bound up to about 8 tokens (int8) or 4 (int4).
        Reference: kernels/reference/quant.py
        """
        return self._product(runtime, x, packed, scales, output_size, bias, out_dtype, out, is_gated=False)

    def gated_linear(
        self,
        runtime: NativeRuntime,
        x: torch.Tensor,
        packed: torch.Tensor,
        scales: torch.Tensor,
        intermediate_size: int,
        bias: torch.Tensor | None = None,
        *,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """silu(x G^T) * (x U^T) in one pass, with the bits of `linear`, then `elementwise.silu_and_mul`.

        Args:
            x: [num_tokens, input_size] bfloat16 or float32; rows may be strided.
            packed, scales: intermediate_size gate outputs, then as many up outputs, as `pack_rows` wrote them.
            intermediate_size: a multiple of 16.
            bias: [2 * intermediate_size] float32 or the dtype of `x`.
            out: [num_tokens, intermediate_size], dtype of `x`, written; rows may be strided. None = a new tensor.

        Returns:
            [num_tokens, intermediate_size], dtype of `x`.

        Raises:
            ShapeError: a size, dtype, device or stride differs from the above.

        Cost: as `linear` with twice the outputs, without writing and reading its result.
        Reference: kernels/reference/quant.py, kernels/reference/activation.py
        """
        check_size("intermediate_size", intermediate_size)
        if intermediate_size % PANEL_SIZE:
            raise ShapeError(
                f"intermediate_size is {intermediate_size}, expected a multiple of {PANEL_SIZE}",
                hint="use linear, then the activation",
                field="intermediate_size",
            )
        return self._product(runtime, x, packed, scales, intermediate_size, bias, None, out, is_gated=True)

    def _product(
        self, runtime: NativeRuntime, x: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, output_size: int,
        bias: torch.Tensor | None, out_dtype: torch.dtype | None, out: torch.Tensor | None, *, is_gated: bool,
    ) -> torch.Tensor:  # fmt: skip
        check_rows("x", x)
        num_tokens, input_size = x.shape
        x_dtype = x.dtype
        _check_input_size(input_size)
        check_size("output_size", output_size)
        num_weights = 2 * output_size if is_gated else output_size
        check_tensor("packed", packed, (PACKED_DTYPE,), self.packed_shape(num_weights, input_size))
        check_tensor("scales", scales, (self.scale_dtype,), self.scales_shape(num_weights, input_size))
        bias_ptr, bias_dtype = 0, torch.float32
        if bias is not None:
            check_tensor("bias", bias, (x_dtype, torch.float32), (num_weights,))
            bias_ptr, bias_dtype = bias.data_ptr(), bias.dtype
        out_dtype = x_dtype if out_dtype is None else out_dtype
        if out_dtype is not x_dtype and out_dtype is not torch.float32:
            raise ShapeError(f"out_dtype is {out_dtype}, expected {x_dtype} or torch.float32", field="out_dtype")
        if out is None:
            out = runtime.empty(num_tokens, output_size, dtype=out_dtype)
        else:
            check_tensor("out", out, (out_dtype,), (num_tokens, output_size), strided_rows=True)
            check_apart("out", out, x=x, packed=packed, scales=scales, bias=bias)
        if num_tokens and output_size:
            getattr(runtime.library, f"linear_{self.name}")(
                runtime.tier_idx, runtime.pool, x.data_ptr(), x.stride(0), packed.data_ptr(), scales.data_ptr(),
                bias_ptr, out.data_ptr(), out.stride(0), num_tokens, output_size, input_size,
                self.group_size(input_size), DTYPE_CODES[x_dtype], DTYPE_CODES[bias_dtype], DTYPE_CODES[out_dtype],
                is_gated,
            )  # fmt: skip
        return out

    def _check_weight(self, packed: torch.Tensor, scales: torch.Tensor, input_size: int) -> int:
        """The outputs that `packed` has room for."""
        _check_input_size(input_size)
        num_outputs = _num_outputs(packed)
        check_tensor("packed", packed, (PACKED_DTYPE,), self.packed_shape(num_outputs, input_size))
        check_tensor("scales", scales, (self.scale_dtype,), self.scales_shape(num_outputs, input_size))
        return num_outputs


class _Int8(QuantFormat):
    name = "int8"
    scale_dtype = torch.float32

    def group_size(self, input_size: int) -> int:
        return 0

    def packed_shape(self, output_size: int, input_size: int) -> tuple[int, ...]:
        return (_ceil_div(output_size, PANEL_SIZE), _ceil_div(input_size, 64), 16, PANEL_SIZE, 4)

    def scales_shape(self, output_size: int, input_size: int) -> tuple[int, ...]:
        return (_ceil_div(output_size, PANEL_SIZE) * PANEL_SIZE,)


class _Int4(QuantFormat):
    """Two values a byte; a group's scale is the one of 14 candidates that leaves the least squared error."""

    name = "int4"
    scale_dtype = torch.bfloat16

    def group_size(self, input_size: int) -> int:
        """The largest of 128, 64, 32 that divides `input_size` rounded up to 32."""
        num_units = _ceil_div(input_size, 32)
        return 128 if num_units % 4 == 0 else 64 if num_units % 2 == 0 else 32

    def packed_shape(self, output_size: int, input_size: int) -> tuple[int, ...]:
        return (_ceil_div(output_size, PANEL_SIZE), _ceil_div(input_size, 32), 4, PANEL_SIZE, 4)

    def scales_shape(self, output_size: int, input_size: int) -> tuple[int, ...]:
        num_groups = _ceil_div(input_size, self.group_size(input_size))
        return (_ceil_div(output_size, PANEL_SIZE), num_groups, PANEL_SIZE)


INT8: QuantFormat = _Int8()
INT4: QuantFormat = _Int4()


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


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
