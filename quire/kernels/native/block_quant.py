"""Linear layers and embeddings on weights in the block formats of GGUF, as they are stored. Stateless.

`BLOCK_KERNELS` has one kernel for each format. Weights are repacked, 16 outputs side by side, and keep their codes and
scales; activations are quantised to int8 inside the product, with a scale for every 32 inputs. Layouts:
csrc/include/quire/block_quant.h. Called by layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

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
from quire.kernels.native.quant import MAX_INPUT_SIZE, PANEL_SIZE
from quire.kernels.native.runtime import NativeRuntime


@dataclass(frozen=True, slots=True)
class BlockKernel:
    """How an [output_size, input_size] matrix in one block format is packed and multiplied.

    Attributes:
        name: of the format, as GGUF writes it ("Q4_K").
        number: of `BlockFormat` in csrc/include/quire/block_quant.h.
        block_size, block_bytes: inputs and bytes of a block in a file.
        record_size, record_bytes: inputs and bytes of a record: some blocks of 16 outputs.
    """

    name: str
    number: int
    block_size: int
    block_bytes: int
    record_size: int
    record_bytes: int

    def packed_shape(self, output_size: int, input_size: int) -> tuple[int, ...]:
        """Shape of the packed weight, uint8, up to whole panels of 16 outputs and whole records.

        Raises:
            ShapeError: `input_size` is not a whole number of blocks.
        """
        self._check_input_size(input_size)
        return (-(-output_size // PANEL_SIZE), -(-input_size // self.record_size), self.record_bytes)

    def row_bytes(self, input_size: int) -> int:
        """Bytes of a row in a file."""
        self._check_input_size(input_size)
        return input_size // self.block_size * self.block_bytes

    def pack_rows(self, runtime: NativeRuntime, blocks: torch.Tensor, packed: torch.Tensor, first_row: int) -> bool:
        """Write rows of a weight as outputs first_row, first_row + 1, ... of `packed`, in place.

        Args:
            blocks: [num_rows, row_bytes] uint8, as the file has them; rows may be strided.
            packed: of `packed_shape`, uint8; mutated for these outputs alone.

        Returns:
            Whether every scale is finite.

        Raises:
            ShapeError: a size, dtype, device or stride differs from the above, or the rows lie outside `packed`.

        Cost: reads the blocks and writes as many bytes; bandwidth bound.
        """
        check_tensor("blocks", blocks, (torch.uint8,), (-1, -1), strided_rows=True)
        num_rows, row_bytes = blocks.shape
        if row_bytes % self.block_bytes:
            raise ShapeError(
                f"rows of {row_bytes} bytes are not whole blocks of {self.name}, of {self.block_bytes} bytes each",
                field="blocks",
            )
        input_size = row_bytes // self.block_bytes * self.block_size
        num_outputs = self._check_packed(packed, input_size)
        check_size("first_row", first_row)
        check_apart("packed", packed, blocks=blocks)
        if first_row + num_rows > num_outputs:
            raise ShapeError(
                f"rows {first_row} .. {first_row + num_rows} do not fit into a packed weight of {num_outputs} outputs",
                field="first_row",
            )
        is_finite: bool = runtime.library.block_pack(
            runtime.tier_idx, runtime.pool, self.number, blocks.data_ptr(), blocks.stride(0), packed.data_ptr(),
            first_row, num_rows, input_size,
        )  # fmt: skip
        return is_finite

    def unpack_rows(
        self, runtime: NativeRuntime, packed: torch.Tensor, input_size: int, first_row: int, num_rows: int
    ) -> torch.Tensor:
        """The weights of outputs first_row .. first_row + num_rows - 1: [num_rows, input_size] float32.

        Raises:
            ShapeError: a size, dtype or device differs from the above, or the rows lie outside `packed`.

        Reference: kernels/reference/block_formats.py, whose bits these are.
        """
        num_outputs = self._check_packed(packed, input_size)
        check_size("first_row", first_row, 0, num_outputs)
        check_size("num_rows", num_rows, 0, num_outputs - first_row)
        ids = torch.arange(first_row, first_row + num_rows)
        return self.gather_rows(runtime, ids, packed, input_size, torch.float32)

    def gather_rows(
        self, runtime: NativeRuntime, ids: torch.Tensor, packed: torch.Tensor, input_size: int, dtype: torch.dtype
    ) -> torch.Tensor:
        """The weights of some outputs: an embedding lookup.

        Args:
            ids: [num_ids] int32 or int64; 0 <= id < number of outputs, up to a whole panel.
            dtype: bfloat16 or float32.

        Returns:
            [num_ids, input_size] of `dtype`: the float32 numbers that the blocks mean, rounded.

        Raises:
            ShapeError: a size, dtype, device or stride differs from the above, or an id is out of range.

        Cost: reads and unpacks 16 rows for each; latency bound.
        Reference: kernels/reference/block_formats.py
        """
        num_outputs = self._check_packed(packed, input_size)
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
        runtime.library.block_gather(
            runtime.tier_idx, runtime.pool, self.number, wide_ids.data_ptr(), packed.data_ptr(), out.data_ptr(),
            ids.shape[0], input_size, DTYPE_CODES[dtype],
        )  # fmt: skip
        return out

    def linear(
        self,
        runtime: NativeRuntime,
        x: torch.Tensor,
        packed: torch.Tensor,
        output_size: int,
        bias: torch.Tensor | None = None,
        *,
        out_dtype: torch.dtype | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute x W^T + bias, with every 32 inputs of a row of `x` quantised to int8 by their largest magnitude.

        A row with NaN or infinity gives NaN in its own outputs alone. Groups of 32 inputs whose largest magnitude is
        below 2 ** -96 count as zero. Sums are exact within 16 or 32 inputs and float32 over the groups, in their order.

        Args:
            x: [num_tokens, input_size] bfloat16 or float32; rows may be strided.
            packed: as `pack_rows` wrote it.
            bias: [output_size] float32 or the dtype of `x`.
            out_dtype: float32 or the dtype of `x`; None = the latter.
            out: [num_tokens, output_size] `out_dtype`, written; rows may be strided, so that it may be some columns
                of a larger result. None = a new tensor.

        Returns:
            [num_tokens, output_size]. A row depends on no other row, nor on the tier or the number of threads.

        Raises:
            ShapeError: a size, dtype, device or stride differs from the above.

        Cost: reads the packed weight once: bandwidth bound up to about 8 tokens.
        Reference: kernels/reference/block_formats.py
        """
        return self._product(runtime, x, packed, output_size, bias, out_dtype, out, is_gated=False)

    def gated_linear(
        self,
        runtime: NativeRuntime,
        x: torch.Tensor,
        packed: torch.Tensor,
        intermediate_size: int,
        bias: torch.Tensor | None = None,
        *,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """silu(x G^T) * (x U^T) in one pass, with the bits of `linear`, then `elementwise.silu_and_mul`.

        Args:
            x: [num_tokens, input_size] bfloat16 or float32; rows may be strided.
            packed: intermediate_size gate outputs, then as many up outputs, as `pack_rows` wrote them.
            intermediate_size: a multiple of 16.
            bias: [2 * intermediate_size] float32 or the dtype of `x`.
            out: [num_tokens, intermediate_size], dtype of `x`, written; rows may be strided. None = a new tensor.

        Returns:
            [num_tokens, intermediate_size], dtype of `x`.

        Raises:
            ShapeError: a size, dtype, device or stride differs from the above.

        Cost: as `linear` with twice the outputs, without writing and reading its result.
        Reference: kernels/reference/block_formats.py, kernels/reference/activation.py
        """
        check_size("intermediate_size", intermediate_size)
        if intermediate_size % PANEL_SIZE:
            raise ShapeError(
                f"intermediate_size is {intermediate_size}, expected a multiple of {PANEL_SIZE}",
                hint="use linear, then the activation",
                field="intermediate_size",
            )
        return self._product(runtime, x, packed, intermediate_size, bias, None, out, is_gated=True)

    def _product(
        self, runtime: NativeRuntime, x: torch.Tensor, packed: torch.Tensor, output_size: int,
        bias: torch.Tensor | None, out_dtype: torch.dtype | None, out: torch.Tensor | None, *, is_gated: bool,
    ) -> torch.Tensor:  # fmt: skip
        check_rows("x", x)
        num_tokens, input_size = x.shape
        x_dtype = x.dtype
        check_size("output_size", output_size)
        num_weights = 2 * output_size if is_gated else output_size
        check_tensor("packed", packed, (torch.uint8,), self.packed_shape(num_weights, input_size))
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
            check_apart("out", out, x=x, packed=packed, bias=bias)
        if num_tokens and output_size:
            runtime.library.block_linear(
                runtime.tier_idx, runtime.pool, self.number, x.data_ptr(), x.stride(0), packed.data_ptr(), bias_ptr,
                out.data_ptr(), out.stride(0), num_tokens, output_size, input_size, DTYPE_CODES[x_dtype],
                DTYPE_CODES[bias_dtype], DTYPE_CODES[out_dtype], is_gated,
            )  # fmt: skip
        return out

    def _check_packed(self, packed: torch.Tensor, input_size: int) -> int:
        """The outputs that `packed` has room for."""
        check_is_tensor("packed", packed)
        check_tensor("packed", packed, (torch.uint8,), (-1, *self.packed_shape(1, input_size)[1:]))
        return packed.shape[0] * PANEL_SIZE

    def _check_input_size(self, input_size: int) -> None:
        if not isinstance(input_size, int) or not 1 <= input_size <= MAX_INPUT_SIZE or input_size % self.block_size:
            raise ShapeError(
                f"{self.name} weights have {input_size!r} inputs, expected a multiple of {self.block_size} up to "
                f"{MAX_INPUT_SIZE}",
                field="input_size",
            )


# name: inputs and bytes of a block, inputs and bytes of a record; in the order of their numbers.
_LAYOUTS = {
    "Q8_0": (32, 34, 64, 1088),
    "Q4_0": (32, 18, 64, 576),
    "Q4_1": (32, 20, 64, 640),
    "Q5_0": (32, 22, 64, 704),
    "Q5_1": (32, 24, 64, 768),
    "Q2_K": (256, 84, 256, 1344),
    "Q3_K": (256, 110, 256, 1856),
    "Q4_K": (256, 144, 256, 2368),
    "Q5_K": (256, 176, 256, 2880),
    "Q6_K": (256, 210, 256, 3392),
    "IQ4_NL": (32, 18, 64, 576),
    "IQ4_XS": (256, 136, 256, 2240),
    "MXFP4": (32, 17, 128, 1088),
}
BLOCK_KERNELS: Mapping[str, BlockKernel] = {
    name: BlockKernel(name, number, *layout) for number, (name, layout) in enumerate(_LAYOUTS.items())
}
