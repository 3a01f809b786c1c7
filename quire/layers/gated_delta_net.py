"""GatedDeltaNet: what lies between the projections of such a layer: convolution, gated delta rule, gated norm."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from quire.attention.context import ForwardContext
from quire.config.recurrent_arch import GatedDeltaNetArch
from quire.core.kv_spec import MambaSpec
from quire.layers.causal_conv import CausalConv
from quire.layers.options import LayerOptions
from quire.layers.recurrent_state import recurrent_batch, state_tensors
from quire.layers.weight_target import TensorTarget, WeightTarget


class GatedDeltaNet(nn.Module):
    """A request's state: one matrix [key_size, value_size] per value head, and the convolution's newest inputs.

    Args:
        layer_idx: its place in `ForwardContext.kv_caches` and `metadata`.

    Source: Yang et al. 2025 (Gated DeltaNet), section 3.4, figure 1.
    """

    def __init__(self, arch: GatedDeltaNetArch, layer_idx: int, *, options: LayerOptions) -> None:
        super().__init__()
        self.arch = arch
        self.layer_idx = layer_idx
        self.kernels = options.kernels
        self.conv = CausalConv(arch.conv_width, arch.conv_size, bias=False, has_silu=True, options=options)
        # Exponents of exponents: they stay float32 whatever the model's dtype.
        self.a_log, self.step_bias = (
            nn.Parameter(torch.empty(arch.num_value_heads, device=options.device), requires_grad=False)
            for _ in range(2)
        )
        self.norm_weight = options.parameter(arch.value_size)
        state = (arch.num_value_heads, arch.key_size, arch.value_size)
        self._state_shapes = (state, self.conv.state_shape)
        self._state_dtypes = (torch.float32, options.dtype)

    def forward(
        self, qkv: torch.Tensor, gate: torch.Tensor, b: torch.Tensor, a: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        """Mix the tokens of each request with its state, which moves on.

        Args:
            qkv: [num_tokens, conv_width]: queries, keys, values.
            gate: [num_tokens, num_value_heads * value_size].
            b, a: [num_tokens, num_value_heads]: of how much changes, and of how much stays.

        Returns:
            [num_tokens, num_value_heads * value_size].
        """
        arch, kernels = self.arch, self.kernels
        kv_cache, metadata = context.state(self.layer_idx)
        batch = recurrent_batch(metadata)
        states, conv_states = state_tensors(kv_cache, self._state_shapes, self._state_dtypes)
        mixed = self.conv(qkv, conv_states, batch)
        decay, beta = kernels.delta_gates(b, a, self.a_log, self.step_bias)
        values = kernels.gated_delta_rule(
            mixed, decay, beta, states, batch, num_key_heads=arch.num_key_heads, scale=arch.key_size**-0.5
        )
        return kernels.gated_rms_norm(values, gate, self.norm_weight, arch.norm.eps, num_groups=arch.num_value_heads)

    def kv_cache_spec(self, block_size: int) -> MambaSpec:
        """The state of one request."""
        dtype_bytes = tuple(dtype.itemsize for dtype in self._state_dtypes)
        return MambaSpec(block_size=block_size, shapes=self._state_shapes, dtype_bytes=dtype_bytes)

    def targets(self, name: str) -> Iterator[tuple[str, WeightTarget]]:
        """The checkpoint's name of each of this layer's tensors, and where it goes; `name` is the layer's."""
        yield from self.conv.targets(f"{name}.conv1d")
        yield f"{name}.A_log", TensorTarget(self.a_log.data)
        yield f"{name}.dt_bias", TensorTarget(self.step_bias.data)
        yield f"{name}.norm.weight", TensorTarget(self.norm_weight.data, neutral=1.0)
