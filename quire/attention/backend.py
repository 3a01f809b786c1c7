"""The interface of an attention implementation. Chosen by `attention.selector`; one file per backend."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from quire.attention.metadata import AttentionMetadata
from quire.kernels.reference.norm import rms_norm
from quire.kernels.reference.rotary import rotary_embedding


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionParams:
    """What never changes about one attention layer.

    Attributes:
        num_heads, num_kv_heads: on this rank; the first is a multiple of the second.
        head_size: elements per head.
        scale: factor on the scores, before the softmax.
        sliding_window: tokens a query sees, itself included; None = all.
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float
    sliding_window: int | None = None


@dataclass(frozen=True, slots=True)
class Rotation:
    """Rotary embedding of a step's tokens.

    Attributes:
        cos, sin: [max_positions, rotary_dim / 2] float32.
        positions: [num_tokens] int64.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    positions: torch.Tensor

    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        """Rotate the heads of `x` [num_tokens, num_heads, head_size]."""
        cos, sin = (table.index_select(0, self.positions).unsqueeze(1) for table in (self.cos, self.sin))
        return rotary_embedding(x, cos, sin)


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """Root-mean-square norms of every query and every key head, applied before they are rotated.

    Attributes:
        query, key: gains, [head_size].
    """

    query: torch.Tensor
    key: torch.Tensor
    eps: float


class AttentionBackend(ABC):
    """Paged attention: one instance serves every layer of a model."""

    name: ClassVar[str]
    preferred_block_size: ClassVar[int]

    @classmethod
    def try_create(cls) -> AttentionBackend | None:
        """A new backend; None where only the device's operations can make it (see `select_backend`)."""
        return cls()

    @staticmethod
    @abstractmethod
    def unsupported_reasons(params: AttentionParams, dtype: torch.dtype, device: torch.device) -> list[str]:
        """Why this backend cannot serve such a layer; empty when it can."""

    @staticmethod
    @abstractmethod
    def kv_cache_shape(num_blocks: int, block_size: int, num_kv_heads: int, head_size: int) -> tuple[int, ...]:
        """Shape of one layer's cache tensor."""

    @abstractmethod
    def forward(
        self,
        params: AttentionParams,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """Write this step's keys and values to their slots, then attend causally over each request's blocks.

        Args:
            query: [num_tokens, num_heads, head_size].
            key, value: [num_tokens, num_kv_heads, head_size].
            kv_cache: mutated.

        Returns:
            [num_tokens, num_heads, head_size], dtype of `query`.
        """

    def copy_pages(self, kv_caches: Sequence[torch.Tensor], source_ids: torch.Tensor, target_ids: torch.Tensor) -> None:
        """Copy blocks onto others in every layer's cache, in place.

        Args:
            kv_caches: of shape [keys or values, block, ...] unless the backend says otherwise.
            source_ids, target_ids: [num_copies] int64 on the cache's device; targets are distinct and no source.
        """
        for kv_cache in kv_caches:
            blocks = kv_cache.view(torch.uint8)  # eight-bit floats cannot be indexed everywhere
            blocks[:, target_ids] = blocks[:, source_ids]

    def forward_fused(
        self,
        params: AttentionParams,
        qkv: torch.Tensor,
        rotation: Rotation,
        head_norms: HeadNorms | None,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """From the fused projection to the heads' outputs: norm, rotate, cache, attend.

        Args:
            qkv: [num_tokens, (num_heads + 2 * num_kv_heads) * head_size]: queries, keys, values; may be overwritten.
            kv_cache: mutated.

        Returns:
            [num_tokens, num_heads * head_size].
        """
        num_heads = [params.num_heads, params.num_kv_heads, params.num_kv_heads]
        query, key, value = torch.split(qkv.view(len(qkv), sum(num_heads), params.head_size), num_heads, dim=1)
        if head_norms is not None:
            query = rms_norm(query, head_norms.query, head_norms.eps)
            key = rms_norm(key, head_norms.key, head_norms.eps)
        query, key = rotation.rotate(query), rotation.rotate(key)
        return self.forward(params, query, key, value, kv_cache, metadata).flatten(1)
