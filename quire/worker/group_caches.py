"""The KV caches of all ranks of a machine as rank 0 sees them: a block is its part on every rank, one after the other.

Called by the worker when the cache is allocated. Tiers and connectors are rank 0's, and have whole blocks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from quire.attention.backend import AttentionBackend
from quire.core.kv_spec import KVCacheConfig
from quire.distributed.seat import Seat
from quire.distributed.shared_pages import SharedPages
from quire.worker.device.memory import HostMemory, KVCaches
from quire.worker.kv_layout import ConnectorCaches
from quire.worker.kv_tier import AnyBlocks, blocks_of


def caches_of_group(
    own: KVCaches,
    seat: Seat | None,
    kv_cache_config: KVCacheConfig,
    layer_names: Sequence[str],
    backend: AttentionBackend,
    dtype: torch.dtype,
) -> tuple[ConnectorCaches, AnyBlocks]:
    """What this process sees of the cache: its own part, and on rank 0 those of the others, which must be allocated.

    Args:
        own: allocated from the same arguments as the others'.
    """
    by_layer = dict(zip(layer_names, own.by_layer, strict=True))
    pools = own.pools
    fds = () if seat is None or seat.rank else seat.cache_fds
    for rank, fd in enumerate(fds[1:], start=1):
        memory = HostMemory(0, SharedPages(fd, is_owner=False))
        other = memory.allocate_kv_caches(kv_cache_config, layer_names, backend, dtype)
        names = [f"{name}.rank{rank}" for name in layer_names]
        by_layer.update(zip(names, other.by_layer, strict=True))
        pools = tuple(
            dataclasses.replace(pool, tensors=pool.tensors + more.tensors)
            for pool, more in zip(pools, other.pools, strict=True)
        )
    return ConnectorCaches(kv_cache_config, by_layer, pools[0]), blocks_of(pools)
