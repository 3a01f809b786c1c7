"""KV cache groups of every kind for tests of the control plane, and by definition what a query sees in them."""

from __future__ import annotations

from collections.abc import Sequence

from quire.core.kv_spec import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    PoolSize,
    SlidingWindowSpec,
)

Group = tuple[str, int]
"""Kind and tokens seen of a KV cache group: ("full", 0), ("window", 6), ("chunk", 8); of latent attention and states
elements."""
FULL: Group = ("full", 0)


def make_kv_cache_config(
    num_blocks: int,
    block_size: int,
    groups: Sequence[Group] = (FULL,),
    num_swap_blocks: int = 0,
    more_pools: Sequence[PoolSize] = (),
) -> KVCacheConfig:
    """Groups of one pool; with `more_pools`, states and latent attention are of the pools that follow it, in turn."""
    made, pool = [], 0
    for i, (kind, size) in enumerate(groups):
        is_other = more_pools and kind in ("state", "latent")
        pool += bool(is_other)
        spec = make_spec(kind, size, block_size)
        made.append(KVCacheGroupSpec(layer_names=(f"layer{i}",), spec=spec, pool=pool if is_other else 0))
    pools = (PoolSize(num_blocks=num_blocks, num_swap_blocks=num_swap_blocks), *more_pools) if more_pools else ()
    return KVCacheConfig(
        num_blocks=num_blocks + sum(one.num_blocks for one in more_pools),
        groups=tuple(made),
        num_swap_blocks=num_swap_blocks + sum(one.num_swap_blocks for one in more_pools),
        pools=pools,
    )


def make_spec(kind: str, size: int, block_size: int) -> KVCacheSpec:
    shape = {"block_size": block_size, "num_kv_heads": 1, "head_size": 1, "dtype_bytes": 4}
    if kind == "state":
        return MambaSpec(block_size=block_size, shapes=((size,),), dtype_bytes=(4,))
    if kind == "latent":
        return MLAAttentionSpec(block_size=block_size, head_size=size, dtype_bytes=4)
    if kind == "window":
        return SlidingWindowSpec(**shape, sliding_window=size)
    if kind == "chunk":
        return ChunkedLocalAttentionSpec(**shape, attention_chunk_size=size)
    return FullAttentionSpec(**shape)


def first_token_seen(group: Group, position: int) -> int:
    """The oldest token that the query at `position` sees, one at a time by definition."""
    kind, size = group
    sees = {"full": lambda key: True, "latent": lambda key: True, "window": lambda key: position - key < size}
    sees["chunk"] = lambda key: key // size == position // size
    return next(key for key in range(position + 1) if sees[kind](key))
