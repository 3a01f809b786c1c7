"""Block transfers: blocks between the KV cache and the swap space, as the scheduler's message says.

Made with the KV cache by `DeviceMemory`, called by the model runner before a step computes. Owns the memory of the swap
space. Outs come before ins: a block that is swapped out may be given to a request that comes back in the same step.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from quire.core.scheduler_output import BlockCopies, SchedulerOutput
from quire.worker.kv_cache_tensors import CachePool

CopyTimes = Callable[[], tuple[float | None, float | None]]
"""Called when a step is done: seconds of its copies out and in; None = there were none, or they were not measured."""


def no_copies() -> tuple[None, None]:
    """The times of a step without copies."""
    return None, None


class BlockTransfers(ABC):
    """Carries out the swaps of steps."""

    def run(self, scheduled: SchedulerOutput) -> CopyTimes:
        """Copy the step's blocks out, then in; what the step computes comes after them."""
        if not len(scheduled.swap_outs) and not len(scheduled.swap_ins):
            return no_copies
        return self.swap(scheduled.swap_outs, scheduled.swap_ins)

    @abstractmethod
    def swap(self, outs: BlockCopies, ins: BlockCopies) -> CopyTimes:
        """As `run`, of some blocks."""


class HostTransfers(BlockTransfers):
    """Cache and swap space are both the processor's memory, in the same tensors.

    Args:
        pools: with the blocks of the swap space behind those of the cache.
        clock: seconds.
    """

    def __init__(self, pools: Sequence[CachePool], clock: Callable[[], float] = time.perf_counter) -> None:
        self._pools = tuple(pools)
        self._clock = clock

    def swap(self, outs: BlockCopies, ins: BlockCopies) -> CopyTimes:
        """Copy blocks out, then in."""
        out_s = self._copy(outs.source_ids, outs.target_ids, is_out=True)
        in_s = self._copy(ins.target_ids, ins.source_ids, is_out=False)
        return lambda: (out_s, in_s)

    def _copy(self, block_ids: np.ndarray, host_block_ids: np.ndarray, *, is_out: bool) -> float | None:
        if not len(block_ids):
            return None
        start = self._clock()
        for pool in self._pools:
            is_here = pool.find(block_ids)
            if not is_here.any():
                continue
            blocks = block_ids[is_here] - pool.first_id
            host_blocks = host_block_ids[is_here] - pool.first_swap_id + pool.num_blocks
            pool.copy(*((blocks, host_blocks) if is_out else (host_blocks, blocks)))
        return self._clock() - start


class DeviceTransfers(BlockTransfers):
    """The cache is in a device's memory, the swap space in the host's.

    A layer's blocks are gathered on the device, then copied in runs of consecutive host blocks. All of it is queued on
    the stream that computes, so that the step waits for it and the host does not.

    Args:
        pools: the blocks of the cache.
    """

    def __init__(self, pools: Sequence[CachePool]) -> None:
        self._pools = tuple(pools)
        self._parts = [
            [_as_bytes(part) for cache in pool.tensors for part in _parts(cache, pool.dim)] for pool in pools
        ]
        self._host_parts = [
            [self._host_blocks(pool.num_swap_blocks, part.shape[1]) for part in parts]
            for pool, parts in zip(pools, self._parts, strict=True)
        ]
        self._device = pools[0].tensors[0].device

    def swap(self, outs: BlockCopies, ins: BlockCopies) -> CopyTimes:
        """Queue the copies of blocks out, then in; times are the device's."""
        out_s = self._queue(outs, self._copy_out)
        in_s = self._queue(ins, self._copy_in)
        return lambda: (out_s(), in_s())

    def _queue(self, copies: BlockCopies, copy: Callable[[BlockCopies], None]) -> Callable[[], float | None]:
        """Queue copies; what is returned says how long they took, once the device is through."""
        if not len(copies):
            return lambda: None
        start = self._mark()
        copy(copies)
        end = self._mark()
        return lambda: None if start is None or end is None else start.elapsed_time(end) / 1000

    def _host_blocks(self, num_blocks: int, page_bytes: int) -> torch.Tensor:
        """Memory of the swap space for one layer."""
        return torch.empty((num_blocks, page_bytes), dtype=torch.uint8)

    def _mark(self) -> torch.cuda.Event | None:
        """A point in the device's queue, to measure from or to; None = times are not measured."""
        return None

    def _copy_out(self, copies: BlockCopies) -> None:
        for blocks, ids, host_parts, host_ids in self._by_pool(copies.source_ids, copies.target_ids):
            for part, host_blocks in zip(blocks, host_parts, strict=True):
                gathered = part.index_select(0, ids)
                for i, host_block, num in _runs(host_ids):
                    host_blocks[host_block : host_block + num].copy_(gathered[i : i + num], non_blocking=True)

    def _copy_in(self, copies: BlockCopies) -> None:
        for blocks, ids, host_parts, host_ids in self._by_pool(copies.target_ids, copies.source_ids):
            for part, host_blocks in zip(blocks, host_parts, strict=True):
                gathered = torch.empty((len(ids), part.shape[1]), dtype=torch.uint8, device=self._device)
                for i, host_block, num in _runs(host_ids):
                    gathered[i : i + num].copy_(host_blocks[host_block : host_block + num], non_blocking=True)
                part.index_copy_(0, ids, gathered)

    def _by_pool(
        self, block_ids: np.ndarray, host_block_ids: np.ndarray
    ) -> Iterator[tuple[list[torch.Tensor], torch.Tensor, list[torch.Tensor], np.ndarray]]:
        """Per pool with any of these blocks: its layers' blocks, which of them, its host blocks, which of them."""
        for pool, parts, host_parts in zip(self._pools, self._parts, self._host_parts, strict=True):
            is_here = pool.find(block_ids)
            if is_here.any():
                ids = torch.from_numpy((block_ids[is_here] - pool.first_id).astype(np.int64)).to(self._device)
                yield parts, ids, host_parts, host_block_ids[is_here] - pool.first_swap_id


class CudaTransfers(DeviceTransfers):
    """Those of a CUDA device: the swap space is pinned, and copies are timed on the device."""

    def _host_blocks(self, num_blocks: int, page_bytes: int) -> torch.Tensor:
        return torch.empty((num_blocks, page_bytes), dtype=torch.uint8, pin_memory=True)

    def _mark(self) -> torch.cuda.Event | None:
        event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


def _parts(cache: torch.Tensor, dim: int) -> Sequence[torch.Tensor]:
    """Tensors whose first dimension counts blocks."""
    return cache.unbind(0) if dim else (cache,)


def _as_bytes(part: torch.Tensor) -> torch.Tensor:
    """[num_blocks, page_bytes] uint8, a view."""
    return part.flatten(1).view(torch.uint8)


def _runs(ids: np.ndarray) -> Iterator[tuple[int, int, int]]:
    """(index, first id, length) of each run of consecutive ids."""
    starts = np.flatnonzero(np.diff(ids, prepend=-2) != 1)
    ends = np.append(starts[1:], len(ids))
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        yield start, int(ids[start]), end - start
