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

from quire.attention.backend import AttentionBackend
from quire.core.scheduler_output import BlockCopies, SchedulerOutput

CopyTimes = Callable[[], tuple[float | None, float | None]]
"""Called when a step is done: seconds of its copies out and in; None = there were none, or they were not measured."""


def no_copies() -> tuple[None, None]:
    """The times of a step without copies."""
    return None, None


class BlockTransfers(ABC):
    """Carries out the swaps of steps."""

    @abstractmethod
    def run(self, scheduled: SchedulerOutput) -> CopyTimes:
        """Copy the step's blocks out, then in; what the step computes comes after them."""


class HostTransfers(BlockTransfers):
    """Cache and swap space are both the processor's memory.

    Args:
        kv_caches: distinct tensors: the blocks of the cache, then those of the swap space.
        backend: which copies blocks.
        num_blocks: blocks of the cache.
        clock: seconds.
    """

    def __init__(
        self,
        kv_caches: Sequence[torch.Tensor],
        backend: AttentionBackend,
        num_blocks: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._kv_caches = tuple(kv_caches)
        self._backend = backend
        self._num_blocks = num_blocks
        self._clock = clock

    def run(self, scheduled: SchedulerOutput) -> CopyTimes:
        """Copy the step's blocks out, then in."""
        if not len(scheduled.swap_outs) and not len(scheduled.swap_ins):
            return no_copies
        outs, ins = scheduled.swap_outs, scheduled.swap_ins
        out_s = self._copy(outs.source_ids, outs.target_ids + self._num_blocks)
        in_s = self._copy(ins.source_ids + self._num_blocks, ins.target_ids)
        return lambda: (out_s, in_s)

    def _copy(self, source_ids: np.ndarray, target_ids: np.ndarray) -> float | None:
        if not len(source_ids):
            return None
        start = self._clock()
        sources, targets = (torch.from_numpy(ids.astype(np.int64)) for ids in (source_ids, target_ids))
        self._backend.copy_pages(self._kv_caches, sources, targets)
        return self._clock() - start


class DeviceTransfers(BlockTransfers):
    """The cache is in a device's memory, the swap space in the host's.

    A layer's blocks are gathered on the device, then copied in runs of consecutive host blocks. All of it is queued on
    the stream that computes, so that the step waits for it and the host does not.

    Args:
        kv_caches: distinct tensors: the blocks of the cache.
        dim: the dimension of the tensors that counts blocks, 0 or 1.
        num_swap_blocks: blocks of the swap space.
    """

    def __init__(self, kv_caches: Sequence[torch.Tensor], dim: int, num_swap_blocks: int) -> None:
        parts = [part for cache in kv_caches for part in (cache.unbind(0) if dim else (cache,))]
        self._parts = [part.flatten(1).view(torch.uint8) for part in parts]
        self._device = kv_caches[0].device
        self._host_parts = [self._host_blocks(num_swap_blocks, part.shape[1]) for part in self._parts]

    def run(self, scheduled: SchedulerOutput) -> CopyTimes:
        """Queue the copies of the step's blocks out, then in; times are the device's."""
        if not len(scheduled.swap_outs) and not len(scheduled.swap_ins):
            return no_copies
        out_s = self._queue(scheduled.swap_outs, self._copy_out)
        in_s = self._queue(scheduled.swap_ins, self._copy_in)
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
        ids = torch.from_numpy(copies.source_ids.astype(np.int64)).to(self._device)
        for blocks, host_blocks in zip(self._parts, self._host_parts, strict=True):
            gathered = blocks.index_select(0, ids)
            for i, host_block, num_blocks in _runs(copies.target_ids):
                host_blocks[host_block : host_block + num_blocks].copy_(gathered[i : i + num_blocks], non_blocking=True)

    def _copy_in(self, copies: BlockCopies) -> None:
        ids = torch.from_numpy(copies.target_ids.astype(np.int64)).to(self._device)
        for blocks, host_blocks in zip(self._parts, self._host_parts, strict=True):
            gathered = torch.empty((len(ids), blocks.shape[1]), dtype=torch.uint8, device=self._device)
            for i, host_block, num_blocks in _runs(copies.source_ids):
                gathered[i : i + num_blocks].copy_(host_blocks[host_block : host_block + num_blocks], non_blocking=True)
            blocks.index_copy_(0, ids, gathered)


class CudaTransfers(DeviceTransfers):
    """Those of a CUDA device: the swap space is pinned, and copies are timed on the device."""

    def _host_blocks(self, num_blocks: int, page_bytes: int) -> torch.Tensor:
        return torch.empty((num_blocks, page_bytes), dtype=torch.uint8, pin_memory=True)

    def _mark(self) -> torch.cuda.Event | None:
        event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


def _runs(ids: np.ndarray) -> Iterator[tuple[int, int, int]]:
    """(index, first id, length) of each run of consecutive ids."""
    starts = np.flatnonzero(np.diff(ids, prepend=-2) != 1)
    ends = np.append(starts[1:], len(ids))
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        yield start, int(ids[start]), end - start
