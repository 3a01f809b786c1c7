"""Where a model meets the attention backend."""

from __future__ import annotations

import torch
from torch import nn

from quire.attention.backend import AttentionBackend, AttentionParams
from quire.attention.context import ForwardContext


class Attention(nn.Module):
    """One layer's paged attention.

    Args:
        layer_idx: its place in `ForwardContext.kv_caches` and `metadata`.
        layer_name: its name in the KV cache specs.
    """

    def __init__(self, params: AttentionParams, backend: AttentionBackend, layer_idx: int, layer_name: str) -> None:
        super().__init__()
        self.params = params
        self.backend = backend
        self.layer_idx = layer_idx
        self.layer_name = layer_name

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        """Cache the new keys and values, then attend.

        Args:
            query: [num_tokens, num_heads, head_size].
            key, value: [num_tokens, num_kv_heads, head_size].

        Returns:
            [num_tokens, num_heads * head_size].
        """
        cache, metadata = context.kv_caches[self.layer_idx], context.metadata[self.layer_idx]
        output = self.backend.forward(self.params, query, key, value, cache, metadata)
        return output.flatten(1)
