"""The interface of latent attention: what a backend that serves it offers beside `AttentionBackend`.

A layer's cache has one row for each token: its latent, which is the value of all heads, then the part of the key that
carries the position. Queries come multiplied by the up-projection of keys, results go to that of values.

Source: DeepSeek-AI 2024 (DeepSeek-V2), section 2.1.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from quire.attention.backend import AttentionBackend, Rotation
from quire.attention.metadata import AttentionMetadata
from quire.errors import UnsupportedError


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentParams:
    """What never changes about one latent attention layer.

    Attributes:
        num_heads: on this rank.
        latent_size, rope_size: elements of a cached token: of its latent, and of its rotated key.
        scale: factor on the scores, before the softmax.
        eps: of the norm of latents.
    """

    num_heads: int
    latent_size: int
    rope_size: int
    scale: float
    eps: float

    @property
    def width(self) -> int:
        """Elements of a cached token."""
        return self.latent_size + self.rope_size


class LatentBackend(ABC):
    """Latent attention over pages: one instance serves every layer of a model."""

    @staticmethod
    @abstractmethod
    def cache_shape(num_blocks: int, block_size: int, width: int) -> tuple[int, ...]:
        """Shape of one layer's cache tensor."""

    @abstractmethod
    def forward(
        self,
        params: LatentParams,
        query: torch.Tensor,
        absorbed: torch.Tensor,
        latent: torch.Tensor,
        gain: torch.Tensor,
        rotation: Rotation,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """Normalize and rotate, cache this step's tokens, then attend causally over each request's blocks.

        Args:
            query: [num_tokens, num_heads, query_size]; its last rope_size elements are to be rotated; tokens may be
                strided.
            absorbed: [num_tokens, num_heads, width]; the other elements of the query, multiplied by the up-projection
                of keys, then room for the rotated ones: overwritten.
            latent: [num_tokens, width]: a latent before its norm, then the part of the key that is to be rotated.
            gain: [latent_size]; of the norm.
            kv_cache: mutated.

        Returns:
            [num_tokens, num_heads, latent_size].
        """


class ServesLatents(ABC):
    """An attention backend whose layers may be of latent attention."""

    @abstractmethod
    def latent_backend(self) -> LatentBackend:
        """What serves them."""


def latent_backend_of(backend: AttentionBackend) -> LatentBackend:
    """What serves layers of latent attention.

    Raises:
        UnsupportedError: the backend does not.
    """
    if not isinstance(backend, ServesLatents):
        raise UnsupportedError(
            f"attention backend {backend.name!r} does not have latent attention",
            hint="use attention_backend='auto'", field="attention_backend",
        )  # fmt: skip
    return backend.latent_backend()
