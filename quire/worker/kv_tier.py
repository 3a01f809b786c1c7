"""KVTierWorker: the worker's half of a tier behind the KV cache, which copies blocks as the scheduler's half says.

Called by the model runner: before a step computes, and for the reports that go back with its tokens. The names follow
vLLM's `KVConnectorBase_V1`; the scheduler's half is `scheduler.kv_tier`.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from quire.core.kv_transfer import KVTransferMeta, KVTransferResults
from quire.worker.kv_cache_tensors import CachePool
from quire.worker.layer_hooks import LayerHooks


class CacheBlocks:
    """Blocks of the KV cache by number, whole: keys and values of every layer, as they lie in memory.

    Args:
        kv_caches: distinct tensors.
        dim: the dimension of the tensors that counts blocks.

    Attributes:
        num_block_bytes: of one block in all tensors.
    """

    def __init__(self, kv_caches: Sequence[torch.Tensor], dim: int) -> None:
        self._parts = [cache.view(torch.uint8).movedim(dim, 0) for cache in kv_caches]
        self._ends = list(itertools.accumulate(part[0].numel() for part in self._parts))
        self.num_block_bytes = self._ends[-1]

    def num_bytes_of(self, block_id: int) -> int:
        """Bytes of a block: all have as many."""
        return self.num_block_bytes

    def describe(self) -> list[list[int]]:
        """Per tensor: sizes and strides, in bytes, of one block as it lies in memory."""
        return [[*part.shape[1:], *part.stride()[1:]] for part in self._parts]

    def read_into(self, block_id: int, payload: np.ndarray) -> None:
        """Copy a block to `payload` ([num_block_bytes] uint8 on the host), tensor after tensor; from any thread."""
        for part, piece in self._pieces(block_id, payload):
            piece.copy_(part)

    def write_from(self, block_id: int, payload: np.ndarray) -> None:
        """Put what `read_into` gave into a block; from any thread."""
        for part, piece in self._pieces(block_id, payload):
            part.copy_(piece)

    def _pieces(self, block_id: int, payload: np.ndarray) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """A block in each tensor, and the part of `payload` that is its."""
        whole = torch.from_numpy(payload)
        for part, start, end in zip(self._parts, [0, *self._ends[:-1]], self._ends, strict=True):
            yield part[block_id], whole[start:end].view(part.shape[1:])

    def read(self, block_ids: np.ndarray | Sequence[int]) -> list[torch.Tensor]:
        """Per tensor: [num_pages, ...] uint8 on the host, a copy of blocks `block_ids` ([num_pages])."""
        return [part.index_select(0, self._index(block_ids)).cpu() for part in self._parts]

    def write(self, block_ids: np.ndarray | Sequence[int], blocks: Sequence[torch.Tensor]) -> None:
        """Put what `read` returned into blocks `block_ids` ([num_pages], distinct)."""
        for part, block in zip(self._parts, blocks, strict=True):
            part.index_copy_(0, self._index(block_ids), block.to(part.device))

    def _index(self, block_ids: np.ndarray | Sequence[int]) -> torch.Tensor:
        return torch.from_numpy(np.array(block_ids, dtype=np.int64)).to(self._parts[0].device)


class PooledBlocks:
    """Blocks of several pools, by the numbers that blocks have among all of them.

    Args:
        pools: of each pool its blocks, numbered from 0, and how many these are.

    Attributes:
        num_block_bytes: of one block of the pool whose blocks are the largest.
    """

    def __init__(self, pools: Sequence[tuple[CacheBlocks, int]]) -> None:
        self._pools = [blocks for blocks, _ in pools]
        self._first_ids = list(itertools.accumulate((num for _, num in pools[:-1]), initial=0))
        self.num_block_bytes = max(blocks.num_block_bytes for blocks in self._pools)

    def describe(self) -> list[list[list[int]]]:
        """Per pool: as `CacheBlocks`."""
        return [blocks.describe() for blocks in self._pools]

    def num_bytes_of(self, block_id: int) -> int:
        """Bytes of a block."""
        return self._find(block_id)[0].num_block_bytes

    def read_into(self, block_id: int, payload: np.ndarray) -> None:
        """As `CacheBlocks`."""
        pool, number = self._find(block_id)
        pool.read_into(number, payload)

    def write_from(self, block_id: int, payload: np.ndarray) -> None:
        """As `CacheBlocks`."""
        pool, number = self._find(block_id)
        pool.write_from(number, payload)

    def _find(self, block_id: int) -> tuple[CacheBlocks, int]:
        pool = bisect.bisect_right(self._first_ids, block_id) - 1
        return self._pools[pool], block_id - self._first_ids[pool]


AnyBlocks = CacheBlocks | PooledBlocks


def blocks_of(pools: Sequence[CachePool]) -> AnyBlocks:
    """The blocks of a cache, those of the swap space left out."""
    parts = [
        (CacheBlocks([part.narrow(pool.dim, 0, pool.num_blocks) for part in pool.tensors], pool.dim), pool.num_blocks)
        for pool in pools
    ]
    return parts[0][0] if len(parts) == 1 else PooledBlocks(parts)


class KVTierWorker(ABC):
    """Copies between the KV cache and wherever the tier keeps blocks."""

    @abstractmethod
    def register_kv_caches(self, blocks: AnyBlocks) -> None:
        """The cache, before the first step."""

    def begin_step(self) -> None:  # noqa: B027 (most tiers have nothing to do)
        """A step begins; the one before may have failed anywhere."""

    @abstractmethod
    def start_transfers(self, meta: KVTransferMeta) -> None:
        """Begin a step's transfers; loads that are not asynchronous are made when it returns.

        A transfer may come a second time, under its id, when the step that carried it failed.
        """

    def layer_hooks(self) -> LayerHooks | None:
        """Calls around each layer of the step that begins; None = there are none, as nearly always."""
        return None

    @property
    def reads_step(self) -> bool:
        """Whether `finish_forward` of the step that began may read what it computes."""
        return False

    def finish_forward(self) -> None:  # noqa: B027 - most tiers have nothing to do
        """The step has computed its tokens, and does not sample yet."""

    def shutdown(self) -> None:  # noqa: B027 - as above
        """The engine ends; harmless when repeated."""

    @abstractmethod
    def get_finished(self) -> KVTransferResults:
        """Transfers that have ended since the last call; after each step, also where it began none.

        A failure of a load that is not asynchronous is reported after its own step.
        """


class StackedTiers(KVTierWorker):
    """Several tiers' halves, in the order of their other halves; each is given its own transfers."""

    def __init__(self, tiers: Sequence[KVTierWorker]) -> None:
        self.tiers = tuple(tiers)

    def register_kv_caches(self, blocks: AnyBlocks) -> None:
        """As `KVTierWorker`."""
        for tier in self.tiers:
            tier.register_kv_caches(blocks)

    def begin_step(self) -> None:
        """As `KVTierWorker`."""
        for tier in self.tiers:
            tier.begin_step()

    def start_transfers(self, meta: KVTransferMeta) -> None:
        """As `KVTierWorker`."""
        for number, tier in enumerate(self.tiers):
            loads = tuple(one for one in meta.loads if one.tier == number)
            saves = tuple(one for one in meta.saves if one.tier == number)
            tier.start_transfers(dataclasses.replace(meta, loads=loads, saves=saves))

    def layer_hooks(self) -> LayerHooks | None:
        """As `KVTierWorker`: of the one that has some."""
        return next((hooks for tier in self.tiers if (hooks := tier.layer_hooks()) is not None), None)

    @property
    def reads_step(self) -> bool:
        """As `KVTierWorker`."""
        return any(tier.reads_step for tier in self.tiers)

    def finish_forward(self) -> None:
        """As `KVTierWorker`."""
        for tier in self.tiers:
            tier.finish_forward()

    def shutdown(self) -> None:
        """As `KVTierWorker`."""
        for tier in self.tiers:
            tier.shutdown()

    def get_finished(self) -> KVTransferResults:
        """As `KVTierWorker`."""
        results = [tier.get_finished() for tier in self.tiers]
        return KVTransferResults(
            tuple(itertools.chain.from_iterable(one.done for one in results)),
            tuple(itertools.chain.from_iterable(one.failed for one in results)),
            next((one.connector for one in results if one.connector is not None), None),
        )
