"""LayerKernels: what computes the layers of a model, chosen once and handed to every constructor.

`TorchKernels` runs anywhere. `native.NativeKernels` is the C++ library on a CPU.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch

from quire.kernels.reference.norm import add_rms_norm, rms_norm
from quire.layers.head_linear import DenseHeads, HeadLinearMethod
from quire.layers.linear_method import LinearMethod, UnquantizedLinearMethod


class LayerKernels(ABC):
    """The operations of the layers, by one implementation."""

    def packing(self) -> Mapping[str, str | int] | None:
        """What stored weights depend on besides the checkpoint; None = they are the checkpoint's own tensors."""
        return None

    @abstractmethod
    def linear_method(self, output_size: int, input_size: int) -> LinearMethod:
        """How a projection's weight is stored and multiplied."""

    @abstractmethod
    def table_method(self, vocab_size: int, hidden_size: int) -> LinearMethod:
        """How the table of token vectors is stored, which is the output projection too when the model ties them."""

    def head_linear_method(self) -> HeadLinearMethod:
        """How matrices of single heads are stored and multiplied; never quantized."""
        return DenseHeads()

    @abstractmethod
    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Normalise the rows of `x` [..., size]."""

    @abstractmethod
    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(normalised sum, sum) of x and residual, which may be overwritten."""


class TorchKernels(LayerKernels):
    """Plain torch operations."""

    def linear_method(self, output_size: int, input_size: int) -> LinearMethod:
        """Dense weights."""
        return UnquantizedLinearMethod()

    def table_method(self, vocab_size: int, hidden_size: int) -> LinearMethod:
        """Dense weights."""
        return UnquantizedLinearMethod()

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """The reference."""
        return rms_norm(x, weight, eps)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The reference."""
        return add_rms_norm(x, residual, weight, eps)
