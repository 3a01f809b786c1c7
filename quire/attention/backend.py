"""The interface of an attention implementation. Chosen by `attention.selector`; one file per backend."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeVar

import numpy as np
import torch

from quire.attention.metadata import AttentionMetadata
from quire.attention.sparse import SparseAttention
from quire.kernels.reference.norm import layer_norm, rms_norm
from quire.kernels.reference.rotary import rotary_embedding

# Of tokens within their requests.
Positions = TypeVar("Positions", int, np.ndarray, torch.Tensor)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionParams:
    """What never changes about one attention layer.

    Attributes:
        num_heads, num_kv_heads: on this rank; the first is a multiple of the second.
        head_size: elements per head.
        scale: factor on the scores, before the softmax.
        sliding_window: tokens a query sees, itself included; None = all.
        chunk: a query sees only tokens of its own chunk of so many, counted from position 0; None = all.
        soft_cap: scores become soft_cap * tanh(score / soft_cap); 0 = as they are.
        alibi_slopes: by head; slope * (key position - query position) is added to the scores.
        shares_kv: the layer has queries alone and attends over the cache of another layer, which it does not write.
        limit: queries, keys and values are cut at -limit and limit, between norms and rotation; 0 = not.
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float
    sliding_window: int | None = None
    chunk: int | None = None
    soft_cap: float = 0.0
    alibi_slopes: tuple[float, ...] | None = None
    shares_kv: bool = False
    limit: float = 0.0

    def oldest_seen(self, positions: Positions) -> Positions:
        """The first position that the query at each position sees; below 0 where a window begins there."""
        oldest: Positions
        if self.chunk is not None:
            oldest = positions - positions % self.chunk
        elif self.sliding_window is not None:
            oldest = positions - self.sliding_window + 1
        else:
            oldest = positions * 0
        return oldest


@dataclass(frozen=True, slots=True)
class Rotation:
    """Rotary embedding of a step's tokens, and what else depends on their positions.

    Attributes:
        cos, sin: [max_positions, rotary_dim / 2] float32; without columns nothing is rotated.
        positions: [num_tokens] int64.
        query_scales: [max_positions] float32; factor on the query of each position, once it is normed and rotated.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    positions: torch.Tensor
    query_scales: torch.Tensor | None = None

    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        """Rotate the heads of `x` [num_tokens, num_heads, head_size]."""
        cos, sin = (table.index_select(0, self.positions).unsqueeze(1) for table in (self.cos, self.sin))
        return rotary_embedding(x, cos, sin)

    def scale(self, query: torch.Tensor) -> torch.Tensor:
        """Multiply the heads of `query` [num_tokens, num_heads, head_size] by the factors of their positions."""
        if self.query_scales is None:
            return query
        return (query.float() * self.query_scales[self.positions, None, None]).to(query.dtype)


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """Norms of the heads of a layer.

    Attributes:
        query, key: gains of every head, [head_size], or of all heads of a token normed as one vector,
            [num_heads * head_size] and [num_kv_heads * head_size].
        value: gains of every value head, [head_size].
        after_rotation: queries and keys are rotated first; with gains of every head only.
        is_centered: queries and keys have a LayerNorm of each head, with gains of all heads, in place of an RMSNorm.
    """

    query: torch.Tensor
    key: torch.Tensor
    eps: float
    value: torch.Tensor | None = None
    after_rotation: bool = False
    is_centered: bool = False

    def norm(self, heads: torch.Tensor, gains: torch.Tensor) -> torch.Tensor:
        """`heads` [num_tokens, num_heads, head_size], each normed or all as one."""
        if self.is_centered:
            return layer_norm(heads, gains.view(heads.shape[1:]), None, self.eps)
        if gains.numel() == heads.shape[-1]:
            return rms_norm(heads, gains, self.eps)
        return rms_norm(heads.flatten(1), gains, self.eps).view_as(heads)


class AttentionBackend(ABC):
    """Paged attention: one instance serves every layer of a model.

    Attributes:
        sparse: called around the attention of layers that see the whole sequence; None = nothing is.
    """

    sparse: SparseAttention | None = None
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
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write this step's keys and values to their slots, then attend causally over each request's blocks.

        Args:
            query: [num_tokens, num_heads, head_size].
            key, value: [num_tokens, num_kv_heads, head_size]; None with `shares_kv`.
            kv_cache: mutated.
            sinks: [num_heads] float32; one more logit of each head, without a value.

        Returns:
            [num_tokens, num_heads, head_size], dtype of `query`.
        """

    def read_keys(self, kv_cache: torch.Tensor, block_ids: torch.Tensor) -> torch.Tensor:
        """Keys of blocks [n]: [n, num_kv_heads, block_size, head_size] float32.

        Args:
            kv_cache: of shape [keys or values, block, token of the block, head, element] unless the backend says
                otherwise.
        """
        return kv_cache[0, block_ids].transpose(1, 2).float()

    def select_blocks(
        self, params: AttentionParams, query: torch.Tensor, kv_cache: torch.Tensor, metadata: AttentionMetadata
    ) -> AttentionMetadata:
        """What the tokens of a layer attend to, where `sparse` may choose; the step's keys are in the cache."""
        assert self.sparse is not None, "asked where there is one"
        if params.sliding_window is not None or params.chunk is not None or params.alibi_slopes is not None:
            return metadata  # positions count there
        return self.sparse.attention_begin(query, kv_cache, metadata, self.read_keys, params.scale)

    def copy_pages(self, kv_caches: Sequence[torch.Tensor], source_ids: torch.Tensor, target_ids: torch.Tensor) -> None:
        """Copy blocks onto others in every layer's cache, in place.

        Args:
            kv_caches: of shape [keys or values, block, ...] unless the backend says otherwise.
            source_ids, target_ids: [num_copies] int64 on the cache's device; targets are distinct and no source.
        """
        for kv_cache in kv_caches:
            blocks = kv_cache.view(torch.uint8)  # eight-bit floats cannot be indexed everywhere
            blocks[:, target_ids] = blocks[:, source_ids]
            if self.sparse is not None:
                self.sparse.blocks_changed(kv_cache, target_ids)

    def copy_slots(self, kv_cache: torch.Tensor, block_size: int, slots: torch.Tensor) -> None:
        """Copy the keys and values of tokens onto those of others, in place.

        Args:
            kv_cache: of shape [keys or values, block, token of the block, ...] unless the backend says otherwise.
            slots: [2, num_copies] int64; from and to; the latter are distinct, and none of the former.
        """
        tokens = kv_cache.view(torch.uint8).flatten(1, 2)
        tokens[:, slots[1]] = tokens[:, slots[0]]

    def forward_fused(
        self,
        params: AttentionParams,
        qkv: torch.Tensor,
        rotation: Rotation | None,
        head_norms: HeadNorms | None,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """From the fused projection to the heads' outputs: norm, rotate, cache, attend.

        Args:
            qkv: [num_tokens, (num_heads + 2 * num_kv_heads) * head_size]: queries, keys, values, with `shares_kv`
                queries alone; may be overwritten.
            rotation: None = nothing depends on positions but what is seen.
            kv_cache: mutated.
            sinks: as `forward`.

        Returns:
            [num_tokens, num_heads * head_size].
        """
        heads = qkv.view(len(qkv), qkv.shape[1] // params.head_size, params.head_size)
        query = prepare_heads(heads[:, : params.num_heads], rotation, head_norms, is_query=True, limit=params.limit)
        key = value = None
        if not params.shares_kv:
            key, value = torch.split(heads[:, params.num_heads :], params.num_kv_heads, dim=1)
            key = prepare_heads(key, rotation, head_norms, is_query=False, limit=params.limit)
            if head_norms is not None and head_norms.value is not None:
                value = rms_norm(value, head_norms.value, head_norms.eps)
            if params.limit:
                value = value.clamp(-params.limit, params.limit)
        return self.forward(params, query, key, value, kv_cache, metadata, sinks).flatten(1)


def prepare_heads(
    heads: torch.Tensor,
    rotation: Rotation | None,
    head_norms: HeadNorms | None,
    *,
    is_query: bool,
    limit: float = 0.0,
) -> torch.Tensor:
    """Query or key heads [num_tokens, num_heads, head_size], normed, cut and rotated, queries scaled too."""
    gains = None
    if head_norms is not None:
        gains = head_norms.query if is_query else head_norms.key
        if not head_norms.after_rotation:
            heads = head_norms.norm(heads, gains)
    if limit:
        heads = heads.clamp(-limit, limit)
    if rotation is not None:
        heads = rotation.rotate(heads)
    if head_norms is not None and gains is not None and head_norms.after_rotation:
        heads = head_norms.norm(heads, gains)
    return rotation.scale(heads) if is_query and rotation is not None else heads
