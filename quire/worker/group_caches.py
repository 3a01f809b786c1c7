"""The KV caches of all ranks of a machine as rank 0 sees them: a block is its part on every rank, one after the other.
Ranks of a pipeline stage have a part of each of its layers.

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
    stages: Sequence[Sequence[str]],
    backend: AttentionBackend,
    dtype: torch.dtype,
) -> tuple[ConnectorCaches, AnyBlocks]:
    """What rank 0 sees of the cache: its own part, and those of the other ranks, which must be allocated.

    Layers of other ranks of a stage are called `NAME.rankI`, i being the rank within its stage.

    Args:
        own: rank 0's, allocated as those of others are here.
        kv_cache_config: of all layers.
        stages: the layers of each pipeline stage.
    """
    by_layer = dict(zip(stages[0], own.by_layer, strict=True))
    pools = own.pools
    fds = () if seat is None else seat.cache_fds
    for rank, fd in enumerate(fds[1:], start=1):
        assert seat is not None, "it has the descriptors"
        stage, rank_of_stage = divmod(rank, seat.stage_size)
        config = kv_cache_config if len(stages) == 1 else kv_cache_config.of_layers(stages[stage])
        memory = HostMemory(0, SharedPages(fd, is_owner=False))
        other = memory.allocate_kv_caches(config, stages[stage], backend, dtype)
        suffix = f".rank{rank_of_stage}" if rank_of_stage else ""
        by_layer.update(zip([f"{name}{suffix}" for name in stages[stage]], other.by_layer, strict=True))
        pools = tuple(
            dataclasses.replace(pool, tensors=pool.tensors + more.tensors)
            for pool, more in zip(pools, other.pools, strict=True)
        )
    return ConnectorCaches(kv_cache_config, by_layer, pools[0]), blocks_of(pools)
