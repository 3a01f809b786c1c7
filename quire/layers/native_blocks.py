"""Weights in the block formats of GGUF, which stay as they are stored. Made by `native` for each format."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from quire.kernels.native.block_quant import BlockKernel
from quire.kernels.native.quant import PANEL_SIZE
from quire.layers.native_weight import NativeLinearMethod, PackedWeight, packed_weight
from quire.layers.stored_weight import StoredWeight
from quire.layers.weight_target import WeightTarget


class BlockRows(WeightTarget):
    """Rows of a weight in one block format.

    Args:
        method: packs and unpacks them.
        weight: that they belong to.
    """

    def __init__(self, method: BlockLinearMethod, weight: PackedWeight, first_row: int, num_rows: int) -> None:
        self.shape = (num_rows, weight.input_size)
        self._method = method
        self._weight = weight
        self._first_row = first_row

    def load(self, tensor: torch.Tensor) -> bool:
        """Not possible: numbers have to be brought into the format elsewhere."""
        raise NotImplementedError(f"{self._method.kernel.name} weights are loaded as they are stored")

    def load_stored(self, weight: StoredWeight) -> bool:
        """Pack the blocks."""
        method = self._method
        return method.kernel.pack_rows(method.runtime, weight.parts["blocks"], self._weight.packed, self._first_row)

    def stored(self) -> torch.Tensor:
        """What the blocks mean."""
        method, (num_rows, input_size) = self._method, self.shape
        return method.kernel.unpack_rows(method.runtime, self._weight.packed, input_size, self._first_row, num_rows)


@dataclass(frozen=True)
class BlockLinearMethod(NativeLinearMethod):
    """Blocks of 16 outputs side by side; activations are quantized to int8, every 32 inputs for themselves.

    Attributes:
        kernel: of the format.
        dtype: of activations, and of rows looked up.
    """

    kernel: BlockKernel
    dtype: torch.dtype

    def allocate(self, output_size: int, input_size: int, dtype: torch.dtype) -> PackedWeight:
        """Blocks, with their scales within."""
        packed = self.arena.zeros(self.kernel.packed_shape(output_size, input_size), torch.uint8)
        return PackedWeight(packed, torch.empty(0), output_size, input_size)

    def row_target(self, layer: nn.Module, first_row: int, num_rows: int) -> WeightTarget:
        """Packs the rows where they belong."""
        return BlockRows(self, packed_weight(layer), first_row, num_rows)

    def apply(
        self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype
    ) -> torch.Tensor:
        """Quantize the activations and multiply."""
        weight = packed_weight(layer)
        return self.kernel.linear(self.runtime, x, weight.packed, weight.output_size, bias, out_dtype=out_dtype)

    def apply_into(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
        """Quantize the activations and multiply."""
        weight = packed_weight(layer)
        self.kernel.linear(self.runtime, x, weight.packed, weight.output_size, bias, out_dtype=out.dtype, out=out)

    def apply_gated(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Gates and ups meet before they are written, where both fill whole panels."""
        weight = packed_weight(layer)
        size = weight.output_size // 2
        if size % PANEL_SIZE:
            return super().apply_gated(layer, x, bias)
        return self.kernel.gated_linear(self.runtime, x, weight.packed, size, bias)

    def gather_rows(self, layer: nn.Module, row_ids: torch.Tensor) -> torch.Tensor:
        """Unpack the rows."""
        weight = packed_weight(layer)
        return self.kernel.gather_rows(self.runtime, row_ids, weight.packed, weight.input_size, self.dtype)
