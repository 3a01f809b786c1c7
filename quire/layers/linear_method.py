"""LinearMethod: how a weight matrix is stored and multiplied; the seam for packed and quantized weights.

Called by `linear`; chosen by `kernels`. A method holds no tensors: those are parameters or buffers of its layer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import nn

from quire.kernels.reference.activation import silu_and_mul
from quire.layers.weight_target import TensorTarget, WeightTarget


class LinearMethod(ABC):
    """How one kind of weight [output_size, input_size] is stored and applied."""

    @abstractmethod
    def create_weights(
        self, layer: nn.Module, output_size: int, input_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Register the storage of the weight on `layer`; `dtype` is that of its inputs and outputs."""

    @abstractmethod
    def row_target(self, layer: nn.Module, first_row: int, num_rows: int) -> WeightTarget:
        """Where the checkpoint's rows of some outputs go: shape [num_rows, input_size]."""

    @abstractmethod
    def apply(
        self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype
    ) -> torch.Tensor:
        """Multiply and add the bias: [num_tokens, input_size] -> [num_tokens, output_size]."""

    def apply_into(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
        """`apply` into `out` [num_tokens, output_size], whose rows may be strided."""
        out.copy_(self.apply(layer, x, bias, out.dtype))

    def apply_gated(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """silu(gates) * ups, of a layer whose outputs are gates, then as many ups; the bits of `apply`, then the gate.

        Returns:
            [num_tokens, output_size / 2], dtype of `x`.
        """
        return silu_and_mul(self.apply(layer, x, bias, x.dtype))

    @abstractmethod
    def gather_rows(self, layer: nn.Module, row_ids: torch.Tensor) -> torch.Tensor:
        """Rows of the weight: [n] int32 or int64 -> [n, input_size]."""


class UnquantizedLinearMethod(LinearMethod):
    """A dense `weight` [output_size, input_size], multiplied by torch."""

    def create_weights(
        self, layer: nn.Module, output_size: int, input_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Register `weight`."""
        weight = torch.empty(output_size, input_size, dtype=dtype, device=device)
        layer.register_parameter("weight", nn.Parameter(weight, requires_grad=False))

    def row_target(self, layer: nn.Module, first_row: int, num_rows: int) -> WeightTarget:
        """A view of the rows."""
        return TensorTarget(layer.get_parameter("weight").data[first_row : first_row + num_rows])

    def apply(
        self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype
    ) -> torch.Tensor:
        """Multiply by the transposed weight."""
        return nn.functional.linear(x, layer.get_parameter("weight"), bias).to(out_dtype)

    def gather_rows(self, layer: nn.Module, row_ids: torch.Tensor) -> torch.Tensor:
        """Look the rows up."""
        return nn.functional.embedding(row_ids, layer.get_parameter("weight"))
