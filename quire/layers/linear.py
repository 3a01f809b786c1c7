"""Matrix products: `Linear`, and `MergedLinear` for projections that share their input.

How the weight is stored and multiplied is a `LinearMethod`: the seam for quantization.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping

import torch
from torch import nn

from quire.layers.options import TensorOptions


class LinearMethod(ABC):
    """How one kind of weight is stored and applied. Holds no tensors: those are the layer's parameters."""

    @abstractmethod
    def create_weights(self, layer: Linear, bias: bool, options: TensorOptions) -> None:
        """Register the parameters of `layer`, output rows first."""

    @abstractmethod
    def apply(self, layer: Linear, x: torch.Tensor) -> torch.Tensor:
        """Multiply: [num_tokens, input_size] -> [num_tokens, output_size]."""


class UnquantizedLinearMethod(LinearMethod):
    """A dense `weight` [output_size, input_size] and an optional `bias` [output_size]."""

    def create_weights(self, layer: Linear, bias: bool, options: TensorOptions) -> None:
        """Register `weight` and `bias`."""
        layer.register_parameter("weight", options.parameter(layer.output_size, layer.input_size))
        layer.register_parameter("bias", options.parameter(layer.output_size) if bias else None)

    def apply(self, layer: Linear, x: torch.Tensor) -> torch.Tensor:
        """Multiply by the transposed weight, add the bias."""
        return nn.functional.linear(x, layer.weight, layer.bias)


class Linear(nn.Module):
    """A projection of [num_tokens, input_size] to [num_tokens, output_size]."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        bias: bool,
        options: TensorOptions,
        method: LinearMethod | None = None,
    ) -> None:
        super().__init__()
        self.input_size = input_size
        self.output_size = output_size
        self.method = method or UnquantizedLinearMethod()
        self.method.create_weights(self, bias, options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply by the weight."""
        return self.method.apply(self, x)


class MergedLinear(Linear):
    """Several projections of one input, computed as one; checkpoints hold them apart.

    Args:
        shard_sizes: the checkpoint's name of each projection -> its output size, in the order of the rows.
    """

    def __init__(
        self,
        input_size: int,
        shard_sizes: Mapping[str, int],
        *,
        bias: bool,
        options: TensorOptions,
        method: LinearMethod | None = None,
    ) -> None:
        super().__init__(input_size, sum(shard_sizes.values()), bias=bias, options=options, method=method)
        self.shard_sizes = dict(shard_sizes)

    def shards(self, parameter: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Name and view of each projection's rows in one of this layer's parameters."""
        yield from zip(self.shard_sizes, torch.split(parameter, list(self.shard_sizes.values())), strict=True)
