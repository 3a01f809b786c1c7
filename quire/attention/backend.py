"""The interface of an attention implementation. Chosen by `attention.selector`; one file per backend."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from quire.attention.metadata import AttentionMetadata


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


class AttentionBackend(ABC):
    """Paged attention: one instance serves every layer of a model."""

    name: str
    preferred_block_size: int

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
        """Write this step's keys and values to their slots, then attend causally over each request's pages.

        Args:
            query: [num_tokens, num_heads, head_size].
            key, value: [num_tokens, num_kv_heads, head_size].
            kv_cache: mutated.

        Returns:
            [num_tokens, num_heads, head_size], dtype of `query`.
        """
