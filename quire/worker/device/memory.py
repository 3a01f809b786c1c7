"""DeviceMemory: how much a device has left, and the KV cache in it.

Made with the device's other operations, called by the worker while it starts. Owns nothing: the tensors are the
worker's.
"""

from __future__ import annotations

import math
import mmap
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import torch

from quire.attention.backend import AttentionBackend
from quire.core.kv_spec import KVCacheConfig
from quire.distributed.shared_pages import SharedPages
from quire.utils.memory import HUGE_PAGES, read_memory
from quire.worker.block_transfers import BlockTransfers, CudaTransfers, HostTransfers
from quire.worker.kv_cache_tensors import CachePool, allocate_kv_caches


class KVCaches(NamedTuple):
    """An allocated cache: the tensor of each layer, the pools, and what swaps blocks (None = nothing does)."""

    by_layer: list[torch.Tensor]
    pools: tuple[CachePool, ...]
    transfers: BlockTransfers | None = None


class DeviceMemory(ABC):
    """The memory of one device.

    Attributes:
        is_host: it is the processor's. Then others need what the engine does not: the cache is limited to what
            `max_num_seqs` requests could fill, and the swap space is taken out of the same memory.
    """

    is_host: ClassVar[bool]

    @abstractmethod
    def free_bytes(self) -> int:
        """What the device can still give, looked at now."""

    @abstractmethod
    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A large tensor of zeros."""

    @abstractmethod
    def allocate_kv_caches(
        self,
        kv_cache_config: KVCacheConfig,
        layer_names: Sequence[str],
        backend: AttentionBackend,
        dtype: torch.dtype,
    ) -> KVCaches:
        """The cache, with its swap space if there is one."""


class HostMemory(DeviceMemory):
    """The processor's memory. It is only taken as it is first written.

    Args:
        available_bytes: never more is free.
        pages: that other processes map, too, of which it is taken; None = it is this process's own.
    """

    is_host = True

    def __init__(self, available_bytes: int, pages: SharedPages | None = None) -> None:
        self._available_bytes = available_bytes
        self._pages = pages

    def free_bytes(self) -> int:
        """What the machine, or the process's control group, has left."""
        return min(self._available_bytes, read_memory().available_bytes)

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Zero blocks of the operating system, huge ones where it has them."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if self._pages is not None:
            return torch.frombuffer(self._pages.take(num_bytes), dtype=torch.uint8)[:num_bytes].view(dtype).view(shape)
        # Private, as shared memory gets huge pages only where another setting of the system allows it, which few do.
        blocks = mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            blocks.madvise(mmap.MADV_HUGEPAGE)
            HUGE_PAGES.add(num_bytes)
        return torch.frombuffer(blocks, dtype=torch.uint8)[:num_bytes].view(dtype).view(shape)

    def allocate_kv_caches(
        self,
        kv_cache_config: KVCacheConfig,
        layer_names: Sequence[str],
        backend: AttentionBackend,
        dtype: torch.dtype,
    ) -> KVCaches:
        """The swap space lies behind the cache, in the same tensors."""
        has_swap_space = kv_cache_config.num_swap_blocks > 0
        caches, pools = allocate_kv_caches(
            kv_cache_config, layer_names, backend, dtype, self.zeros, with_swap_space=has_swap_space
        )
        return KVCaches(caches, pools, HostTransfers(pools) if has_swap_space else None)


class CudaMemory(DeviceMemory):
    """A CUDA device's memory; the swap space is pinned memory of the host."""

    is_host = False

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def free_bytes(self) -> int:
        """What the driver has left."""
        free_bytes, _ = torch.cuda.mem_get_info(self._device)
        return free_bytes

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Zeros from torch's allocator."""
        return torch.zeros(shape, dtype=dtype, device=self._device)

    def allocate_kv_caches(
        self,
        kv_cache_config: KVCacheConfig,
        layer_names: Sequence[str],
        backend: AttentionBackend,
        dtype: torch.dtype,
    ) -> KVCaches:
        """As `DeviceMemory.allocate_kv_caches`."""
        caches, pools = allocate_kv_caches(kv_cache_config, layer_names, backend, dtype, self.zeros)
        return KVCaches(caches, pools, CudaTransfers(pools) if kv_cache_config.num_swap_blocks else None)
