"""What a forward pass needs besides its tokens, passed down as a value (no globals)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quire.attention.metadata import AttentionMetadata, StateMetadata


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """Handed through `model.forward(input_ids, positions, context)` to every layer that keeps something in the cache.

    Attributes:
        metadata: per layer: the metadata of the layer's KV cache group.
        kv_caches: per layer: the cache tensor; in the attention backend's own layout, or bytes of states.
        wanted: [num_wanted] int64, tokens whose hidden states are asked for, whatever those of others are; None = all.
    """

    metadata: tuple[AttentionMetadata | StateMetadata, ...]
    kv_caches: tuple[torch.Tensor, ...]
    wanted: torch.Tensor | None = None

    def attention(self, layer_idx: int) -> tuple[torch.Tensor, AttentionMetadata]:
        """Cache and metadata of an attention layer."""
        metadata = self.metadata[layer_idx]
        assert isinstance(metadata, AttentionMetadata), "the KV cache spec of an attention layer is one of attention"
        return self.kv_caches[layer_idx], metadata

    def state(self, layer_idx: int) -> tuple[torch.Tensor, StateMetadata]:
        """Cache and metadata of a recurrent layer."""
        metadata = self.metadata[layer_idx]
        assert isinstance(metadata, StateMetadata), "the KV cache spec of a recurrent layer is a MambaSpec"
        return self.kv_caches[layer_idx], metadata
