"""ShortConv: what lies between the projections of LFM2's convolution layers: C * conv(B * x)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from quire.attention.context import ForwardContext
from quire.config.recurrent_arch import ShortConvArch
from quire.core.kv_spec import MambaSpec
from quire.layers.causal_conv import CausalConv
from quire.layers.options import LayerOptions
from quire.layers.recurrent_state import recurrent_batch, state_tensors
from quire.layers.weight_target import WeightTarget


class ShortConv(nn.Module):
    """A request's state is the convolution's newest inputs.

    Args:
        layer_idx: its place in `ForwardContext.kv_caches` and `metadata`.

    Source: Liquid AI 2025 (LFM2 Technical Report), section 2.
    """

    def __init__(self, channels: int, arch: ShortConvArch, layer_idx: int, *, options: LayerOptions) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.kernels = options.kernels
        self.conv = CausalConv(channels, arch.conv_size, bias=arch.has_bias, has_silu=False, options=options)
        self._dtype = options.dtype

    def forward(self, bcx: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """[num_tokens, 3 * channels], B, C and x of each token -> [num_tokens, channels]."""
        kv_cache, metadata = context.state(self.layer_idx)
        (states,) = state_tensors(kv_cache, (self.conv.state_shape,), (self._dtype,))
        b, c, x = bcx.chunk(3, dim=-1)
        convolved = self.conv(self.kernels.multiply(x, b), states, recurrent_batch(metadata))
        return self.kernels.multiply(convolved, c)

    def kv_cache_spec(self, block_size: int) -> MambaSpec:
        """The state of one request."""
        return MambaSpec(block_size=block_size, shapes=(self.conv.state_shape,), dtype_bytes=(self._dtype.itemsize,))

    def targets(self, name: str) -> Iterator[tuple[str, WeightTarget]]:
        """The checkpoint's name of each of this layer's tensors, and where it goes; `name` is the layer's."""
        yield from self.conv.targets(f"{name}.conv")
