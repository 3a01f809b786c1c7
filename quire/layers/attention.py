"""Where a model meets the attention backend."""

from __future__ import annotations

import torch
from torch import nn

from quire.attention.backend import AttentionBackend, AttentionParams, HeadNorms, Rotation
from quire.attention.context import ForwardContext


class Attention(nn.Module):
    """One layer's paged attention, from the fused projection to the heads' outputs.

    Args:
        layer_idx: its place in `ForwardContext.kv_caches` and `metadata`, or that of the layer whose cache it shares.
    """

    def __init__(self, params: AttentionParams, backend: AttentionBackend, layer_idx: int) -> None:
        super().__init__()
        self.params = params
        self.backend = backend
        self.layer_idx = layer_idx

    def forward(
        self,
        qkv: torch.Tensor,
        rotation: Rotation | None,
        context: ForwardContext,
        head_norms: HeadNorms | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Norm and rotate the heads, cache the new keys and values, then attend.

        Args:
            qkv: [num_tokens, (num_heads + 2 * num_kv_heads) * head_size], queries alone where the layer shares another
                one's cache; may be overwritten.
            sinks: [num_heads] float32; one more logit of each head, without a value.

        Returns:
            [num_tokens, num_heads * head_size].
        """
        cache, metadata = context.attention(self.layer_idx)
        return self.backend.forward_fused(self.params, qkv, rotation, head_norms, cache, metadata, sinks)
