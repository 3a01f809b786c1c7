"""Products with a matrix of each head on the C++ library: packed weights in the model's type. Made by `native`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from quire.kernels.native import latent, linear
from quire.kernels.native.arena import HugeArena
from quire.kernels.native.runtime import NativeRuntime
from quire.layers.head_linear import HeadLinearMethod


@dataclass(frozen=True)
class PackedHeads(HeadLinearMethod):
    """Panels of 16 outputs, head by head.

    Attributes:
        runtime: tier and threads.
        arena: where weights live.
    """

    runtime: NativeRuntime
    arena: HugeArena

    def create_weights(
        self,
        layer: nn.Module,
        num_heads: int,
        output_size: int,
        input_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Register `packed`."""
        packed = self.arena.zeros((num_heads, *linear.packed_shape(output_size, input_size, dtype)), dtype)
        layer.register_buffer("packed", packed)
        layer.__dict__["packed_heads"] = (
            packed,
            output_size,
            input_size,
        )  # to look a buffer up takes as long as a kernel

    def load(self, layer: nn.Module, weight: torch.Tensor) -> bool:
        """Pack."""
        packed, _, _ = layer.__dict__["packed_heads"]
        return all(linear.pack_rows(self.runtime, rows, packed[head], 0) for head, rows in enumerate(weight))

    def stored(self, layer: nn.Module) -> torch.Tensor:
        """Unpack."""
        packed, output_size, input_size = layer.__dict__["packed_heads"]
        return torch.stack([linear.unpack_rows(self.runtime, head, input_size, 0, output_size) for head in packed])

    def apply(self, layer: nn.Module, x: torch.Tensor, room: int) -> torch.Tensor:
        """Multiply."""
        packed, output_size, _ = layer.__dict__["packed_heads"]
        out = self.runtime.empty(*x.shape[:2], output_size + room, dtype=x.dtype)
        latent.head_linear(self.runtime, x, packed, output_size, out=out[..., :output_size] if room else out)
        return out
