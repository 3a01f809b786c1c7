"""Allocates the KV cache: per pool one tensor for each layer of a group, shared among the groups of the pool.

Called by `DeviceMemory`. A pool of attention has the attention backend's layout, one of states has blocks one after the
other. `CachePool` is what the worker needs of a pool: its tensors, and how blocks of it are copied.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from quire.attention.backend import AttentionBackend
from quire.attention.latent import latent_backend_of
from quire.core.kv_spec import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from quire.errors import UnsupportedError

STORED: tuple[type[AttentionSpec | MLAAttentionSpec], ...] = (
    FullAttentionSpec, SlidingWindowSpec, ChunkedLocalAttentionSpec, MLAAttentionSpec,
)  # fmt: skip
"""The kinds of layers whose cache is stored, beside states."""

Zeros = Callable[[tuple[int, ...], torch.dtype], torch.Tensor]


def stored_spec(layer_name: str, spec: KVCacheSpec, dtype_bytes: int) -> KVCacheSpec:
    """What a layer needs of a cache whose elements have `dtype_bytes` bytes.

    Raises:
        UnsupportedError: no backend stores a layer of its kind.
    """
    if isinstance(spec, MambaSpec):
        return spec  # its elements have sizes of their own
    if not isinstance(spec, STORED):
        names = ", ".join(kind.__name__ for kind in (*STORED, MambaSpec))
        raise UnsupportedError(
            f"layer {layer_name!r} needs {spec.describe()} ({type(spec).__name__}), which no attention "
            "backend supports",
            hint=f"supported types are {names}",
            field="model",
        )
    return dataclasses.replace(spec, dtype_bytes=dtype_bytes)


@dataclass(frozen=True, slots=True)
class CachePool:
    """The tensors of one pool, with the blocks of its swap space behind those of the cache where that is so.

    Attributes:
        tensors: one for each slot.
        dim: the dimension of the tensors that counts blocks.
        num_blocks: of the cache, the null block included.
        num_swap_blocks: of the swap space.
        first_id, first_swap_id: number of its first block, and of its first one in the swap space, among all pools.
        backend: copies blocks; None = they lie one after the other.
    """

    tensors: tuple[torch.Tensor, ...]
    dim: int
    num_blocks: int
    num_swap_blocks: int = 0
    first_id: int = 0
    first_swap_id: int = 0
    backend: AttentionBackend | None = None

    def find(self, block_ids: np.ndarray) -> np.ndarray:
        """[n] bool: which of these blocks are of this pool."""
        is_here: np.ndarray = (block_ids >= self.first_id) & (block_ids < self.first_id + self.num_blocks)
        return is_here

    def copy(self, source_ids: np.ndarray, target_ids: np.ndarray) -> None:
        """Copy blocks onto others in every slot; [num_copies] indices in the tensors."""
        if not self.tensors:  # none of its layers are in this pipeline stage
            return
        device = self.tensors[0].device
        sources, targets = (torch.from_numpy(ids.astype(np.int64)).to(device) for ids in (source_ids, target_ids))
        if self.backend is not None:
            self.backend.copy_pages(self.tensors, sources, targets)
            return
        for tensor in self.tensors:
            blocks = tensor.view(torch.uint8)
            blocks[targets] = blocks[sources]


def allocate_kv_caches(
    kv_cache_config: KVCacheConfig,
    layer_names: Sequence[str],
    backend: AttentionBackend,
    dtype: torch.dtype,
    zeros: Zeros,
    *,
    with_swap_space: bool = False,
) -> tuple[list[torch.Tensor], tuple[CachePool, ...]]:
    """A zeroed cache tensor per layer, in the order of `layer_names`; layers j of a pool's groups have the same one.

    A block id is one block in each tensor of its pool, and belongs to one group at a time: layers of a group share
    nothing, layers of different groups never use a block at once.

    Args:
        zeros: makes a tensor on the device, see `DeviceMemory.zeros`.
        with_swap_space: the blocks of the swap space lie behind those of the cache.
    """
    first_ids, first_swap_ids = kv_cache_config.first_block_ids(), kv_cache_config.first_swap_block_ids()
    caches: dict[str, torch.Tensor] = {}
    pools = []
    for number, size in enumerate(kv_cache_config.pool_sizes()):
        groups = kv_cache_config.groups_of(number)
        shape_of, owner, slot_dtype = _layout(groups[0].spec, backend, dtype)
        few, more = shape_of(2), shape_of(3)
        dim = next(dim for dim, sizes in enumerate(zip(few, more, strict=True)) if sizes[0] != sizes[1])
        shape = shape_of(size.num_blocks + (size.num_swap_blocks if with_swap_space else 0))
        slots = [zeros(shape, slot_dtype) for _ in range(max(len(group.layer_names) for group in groups))]
        for group in groups:
            caches.update(
                (name, slots[slot].narrow(dim, 0, size.num_blocks)) for slot, name in enumerate(group.layer_names)
            )
        ids = (size.num_blocks, size.num_swap_blocks, first_ids[number], first_swap_ids[number])
        pools.append(CachePool(tuple(slots), dim, *ids, owner))
    return [caches[name] for name in layer_names], tuple(pools)


def _layout(
    spec: KVCacheSpec, backend: AttentionBackend, dtype: torch.dtype
) -> tuple[Callable[[int], tuple[int, ...]], AttentionBackend | None, torch.dtype]:
    """Shape of a layer's tensor by number of blocks, what copies its blocks, and type of its elements."""
    if isinstance(spec, AttentionSpec):
        block_size, num_kv_heads, head_size = spec.block_size, spec.num_kv_heads, spec.head_size
        return lambda num: backend.kv_cache_shape(num, block_size, num_kv_heads, head_size), backend, dtype
    if isinstance(spec, MLAAttentionSpec):
        latent, vectors = latent_backend_of(backend), (spec.block_size, spec.head_size)
        return lambda num: latent.cache_shape(num, *vectors), backend, dtype
    page_bytes = spec.page_size_bytes
    return lambda num: (num, page_bytes), None, torch.uint8
