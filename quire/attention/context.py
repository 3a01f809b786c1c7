"""What a forward pass needs besides its tokens, passed down as a value (no globals)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quire.attention.metadata import AttentionMetadata


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """Handed through `model.forward(input_ids, positions, context)` to every attention layer.

    Attributes:
        metadata: per layer: the metadata of the layer's KV cache group.
        kv_caches: per layer: the cache tensor, in the attention backend's own layout.
    """

    metadata: tuple[AttentionMetadata, ...]
    kv_caches: tuple[torch.Tensor, ...]
