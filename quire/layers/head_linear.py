"""HeadLinear: each head's vector multiplied by a matrix of its own, and how the matrices are stored.

Called by latent attention; the method is chosen by the layers' kernels.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import nn


class HeadLinearMethod(ABC):
    """How the weights [num_heads, output_size, input_size] of a layer are stored and applied."""

    @abstractmethod
    def create_weights(
        self,
        layer: nn.Module,
        num_heads: int,
        output_size: int,
        input_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Register their storage on `layer`."""

    @abstractmethod
    def load(self, layer: nn.Module, weight: torch.Tensor) -> bool:
        """Take [num_heads, output_size, input_size], converting the dtype; False when some are NaN or infinite."""

    @abstractmethod
    def stored(self, layer: nn.Module) -> torch.Tensor:
        """The weights as the layer holds them, [num_heads, output_size, input_size]."""

    @abstractmethod
    def apply(self, layer: nn.Module, x: torch.Tensor, room: int) -> torch.Tensor:
        """[num_tokens, num_heads, input_size] -> [num_tokens, num_heads, output_size + room], the rest undefined."""


class DenseHeads(HeadLinearMethod):
    """A dense `weight`, multiplied by torch."""

    def create_weights(
        self,
        layer: nn.Module,
        num_heads: int,
        output_size: int,
        input_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Register `weight`."""
        weight = torch.empty(num_heads, output_size, input_size, dtype=dtype, device=device)
        layer.register_parameter("weight", nn.Parameter(weight, requires_grad=False))

    def load(self, layer: nn.Module, weight: torch.Tensor) -> bool:
        """Copy."""
        stored = layer.get_parameter("weight").data.copy_(weight)
        return bool(stored.isfinite().all())

    def stored(self, layer: nn.Module) -> torch.Tensor:
        """The parameter."""
        return layer.get_parameter("weight").data

    def apply(self, layer: nn.Module, x: torch.Tensor, room: int) -> torch.Tensor:
        """A batch of products."""
        weight = layer.get_parameter("weight")
        product = torch.bmm(x.transpose(0, 1), weight.transpose(1, 2)).transpose(0, 1)
        return nn.functional.pad(product, (0, room)) if room else product.contiguous()


class HeadLinear(nn.Module):
    """A projection of [num_tokens, num_heads, input_size] to [num_tokens, num_heads, output_size]."""

    def __init__(
        self,
        num_heads: int,
        input_size: int,
        output_size: int,
        method: HeadLinearMethod,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.input_size = input_size
        self.output_size = output_size
        self.method = method
        method.create_weights(self, num_heads, output_size, input_size, dtype, device)

    def forward(self, x: torch.Tensor, room: int = 0) -> torch.Tensor:
        """Multiply; `room` more elements follow each head's result, undefined."""
        return self.method.apply(self, x, room)
