"""DeviceMemory: how much a device has left, and the KV cache in it.

Made with the device's other operations, called by the worker while it starts. Owns nothing: the tensors are the
worker's.
"""

from __future__ import annotations

import dataclasses
import math
import mmap
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch

from quire.attention.backend import AttentionBackend
from quire.core.kv_spec import KVCacheConfig
from quire.utils.memory import read_memory
from quire.worker.block_transfers import BlockTransfers, CudaTransfers, HostTransfers
from quire.worker.kv_cache_tensors import allocate_kv_caches, distinct_tensors, page_dim


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
    ) -> tuple[list[torch.Tensor], BlockTransfers | None]:
        """The cache tensor of each layer, and what swaps their blocks; None where there is no swap space."""


class HostMemory(DeviceMemory):
    """The processor's memory. It is only taken as it is first written.

    Args:
        available_bytes: never more is free.
    """

    is_host = True

    def __init__(self, available_bytes: int) -> None:
        self._available_bytes = available_bytes

    def free_bytes(self) -> int:
        """What the machine, or the process's control group, has left."""
        return min(self._available_bytes, read_memory().available_bytes)

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Zero blocks of the operating system, huge ones where it has them."""
        num_bytes = math.prod(shape) * dtype.itemsize
        blocks = mmap.mmap(-1, max(num_bytes, 1))
        if hasattr(mmap, "MADV_HUGEPAGE"):
            blocks.madvise(mmap.MADV_HUGEPAGE)
        return torch.frombuffer(blocks, dtype=torch.uint8)[:num_bytes].view(dtype).view(shape)

    def allocate_kv_caches(
        self,
        kv_cache_config: KVCacheConfig,
        layer_names: Sequence[str],
        backend: AttentionBackend,
        dtype: torch.dtype,
    ) -> tuple[list[torch.Tensor], BlockTransfers | None]:
        """The swap space lies behind the cache, in the same tensors."""
        num_blocks, num_swap_blocks = kv_cache_config.num_blocks, kv_cache_config.num_swap_blocks
        both = dataclasses.replace(kv_cache_config, num_blocks=num_blocks + num_swap_blocks)
        whole = allocate_kv_caches(both, layer_names, backend, dtype, self.zeros)
        if not num_swap_blocks:
            return whole, None
        dim = page_dim(kv_cache_config, backend)
        caches = [cache.narrow(dim, 0, num_blocks) for cache in whole]
        return caches, HostTransfers(distinct_tensors(whole), backend, num_blocks)


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
    ) -> tuple[list[torch.Tensor], BlockTransfers | None]:
        """As `DeviceMemory.allocate_kv_caches`."""
        caches = allocate_kv_caches(kv_cache_config, layer_names, backend, dtype, self.zeros)
        if not kv_cache_config.num_swap_blocks:
            return caches, None
        dim = page_dim(kv_cache_config, backend)
        return caches, CudaTransfers(distinct_tensors(caches), dim, kv_cache_config.num_swap_blocks)
