"""What a layer needs from the KV cache, and how the cache is divided.

Specs are made by the models (data plane), read by `kv_cache.planning` (control plane), and the resulting
`KVCacheConfig` is given to both. Values only.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """KV cache of one attention layer.

    Attributes:
        block_size: tokens per page.
        num_kv_heads: key/value heads on this rank.
        head_size: elements per head.
        dtype_bytes: bytes per element.
        sliding_window: tokens a query sees, itself included; None = all.
        attention_chunk_size: a query sees only tokens of its own chunk of this many; None = all. At most one of the
            two is set.
    """

    block_size: int
    num_kv_heads: int
    head_size: int
    dtype_bytes: int
    sliding_window: int | None = None
    attention_chunk_size: int | None = None

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one page: keys and values."""
        return 2 * self.block_size * self.num_kv_heads * self.head_size * self.dtype_bytes

    @property
    def num_tokens_seen(self) -> int | None:
        """Most tokens that a query sees, itself included; None = all, so pages are kept for the whole sequence."""
        return self.sliding_window if self.attention_chunk_size is None else self.attention_chunk_size


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheGroupSpec:
    """Layers that share one block table.

    `spec` says which pages are kept: a window of its own is only set where pages that left it may be freed.
    """

    layer_names: tuple[str, ...]
    spec: AttentionSpec

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one page id in every layer of the group."""
        return self.spec.page_size_bytes * len(self.layer_names)


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheConfig:
    """The divided cache: `num_blocks` page ids, of which id 0 is the null page and never given out.

    A page id belongs to one group at a time. Layer j of every group keeps its pages in the same tensor (slot j), so a
    page id is one page in each slot; a group of fewer layers leaves the last slots of its pages unused. A group that
    keeps whole sequences comes first, and there is at most one.
    `num_swap_blocks` pages of the same shape are in the swap space, all of them usable.
    """

    num_blocks: int
    groups: tuple[KVCacheGroupSpec, ...]
    num_swap_blocks: int = 0

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one page id, all slots together."""
        return max(group.page_size_bytes for group in self.groups)

    @property
    def block_size(self) -> int:
        """Tokens per page."""
        return self.groups[0].spec.block_size
