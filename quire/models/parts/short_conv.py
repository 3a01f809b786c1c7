"""The short convolution block of LFM2: C * conv(B * x) between an input and an output projection."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from quire.attention.context import ForwardContext
from quire.config.recurrent_arch import ShortConvArch
from quire.core.kv_spec import KVCacheSpec
from quire.layers.linear import Linear
from quire.layers.short_conv import ShortConv
from quire.layers.weight_target import WeightTarget
from quire.models.interfaces import BuildContext
from quire.models.parts.part import Part
from quire.models.tensor_layouts import linear_targets


class ShortConvPart(Part):
    """As many channels as the hidden size has elements.

    Attributes:
        in_proj: B, C, x.
    """

    def __init__(self, build: BuildContext, arch: ShortConvArch, layer_idx: int, name: str) -> None:
        super().__init__()
        options, size = build.options, build.arch.hidden_size
        self.in_proj = Linear(size, 3 * size, bias=arch.has_bias, options=options)
        self.out_proj = Linear(size, size, bias=arch.has_bias, options=options)
        self.mixer = ShortConv(size, arch, build.cache_layers.add(name, self), options=options)

    def forward(self, x: torch.Tensor, positions: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """As `Part`."""
        output: torch.Tensor = self.out_proj(self.mixer(self.in_proj(x), context))
        return output

    def kv_cache_spec(self, block_size: int, dtype_bytes: int) -> KVCacheSpec:
        """The state of one request."""
        return self.mixer.kv_cache_spec(block_size)

    def targets(self, name: str) -> Iterator[tuple[str, WeightTarget]]:
        """As `Part`."""
        yield from linear_targets(self.in_proj, f"{name}.in_proj")
        yield from linear_targets(self.out_proj, f"{name}.out_proj")
        yield from self.mixer.targets(name)
