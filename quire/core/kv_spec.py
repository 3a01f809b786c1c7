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
    """

    block_size: int
    num_kv_heads: int
    head_size: int
    dtype_bytes: int
    sliding_window: int | None = None

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one page: keys and values."""
        return 2 * self.block_size * self.num_kv_heads * self.head_size * self.dtype_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheGroupSpec:
    """Layers that share one block table."""

    layer_names: tuple[str, ...]
    spec: AttentionSpec

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one page id in every layer of the group."""
        return self.spec.page_size_bytes * len(self.layer_names)


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheConfig:
    """The divided cache: `num_blocks` page ids, of which id 0 is the null page and never given out.

    `num_swap_blocks` pages of the same shape are in the swap space, all of them usable.
    """

    num_blocks: int
    groups: tuple[KVCacheGroupSpec, ...]
    num_swap_blocks: int = 0

    @property
    def block_size(self) -> int:
        """Tokens per page."""
        return self.groups[0].spec.block_size

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one page id in every layer."""
        return sum(group.page_size_bytes for group in self.groups)
