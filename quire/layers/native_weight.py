"""How layers hold a packed weight: what the methods of the native library share. Imported by them; no state."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import nn

from quire.kernels.native import elementwise
from quire.kernels.native.arena import HugeArena
from quire.kernels.native.runtime import NativeRuntime
from quire.layers.linear_method import LinearMethod


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A layer's weight as the kernels take it, kept whole: to look a layer's buffers up takes as long as a kernel.

    Attributes:
        packed: a buffer of the layer, filled in place and never replaced.
        scales: likewise; empty unless quantized.
        output_size, input_size: of the matrix, without the padding of `packed`.
    """

    packed: torch.Tensor
    scales: torch.Tensor
    output_size: int
    input_size: int


@dataclass(frozen=True)
class NativeLinearMethod(LinearMethod):
    """What the methods below share.

    Attributes:
        runtime: tier and threads.
        arena: where weights live.
    """

    runtime: NativeRuntime
    arena: HugeArena

    @abstractmethod
    def allocate(self, output_size: int, input_size: int, dtype: torch.dtype) -> PackedWeight:
        """A weight of zeros."""

    def create_weights(
        self, layer: nn.Module, output_size: int, input_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Register `packed`, and `scales` where there are some."""
        weight = self.allocate(output_size, input_size, dtype)
        layer.register_buffer("packed", weight.packed)
        if weight.scales.numel():
            layer.register_buffer("scales", weight.scales)
        layer.__dict__["packed_weight"] = weight

    def apply_gated(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """The product, then one pass over it."""
        return elementwise.silu_and_mul(self.runtime, self.apply(layer, x, bias, x.dtype))


def packed_weight(layer: nn.Module) -> PackedWeight:
    """What `create_weights` made for a layer."""
    weight = layer.__dict__["packed_weight"]
    assert isinstance(weight, PackedWeight)
    return weight
