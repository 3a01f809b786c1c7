"""KVTierWorker: the worker's half of a tier behind the KV cache, which copies blocks as the scheduler's half says.

Called by the model runner: before a step computes, and for the reports that go back with its tokens. The names follow
vLLM's `KVConnectorBase_V1`; the scheduler's half is `scheduler.kv_tier`.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from quire.core.kv_transfer import KVTransferMeta, KVTransferResults
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


class KVTierWorker(ABC):
    """Copies between the KV cache and wherever the tier keeps blocks."""

    @abstractmethod
    def register_kv_caches(self, blocks: CacheBlocks) -> None:
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

    def finish_forward(self) -> None:  # noqa: B027 - most tiers have nothing to do
        """The step has computed its tokens, and does not sample yet."""

    def shutdown(self) -> None:  # noqa: B027 - as above
        """The engine ends; harmless when repeated."""

    @abstractmethod
    def get_finished(self) -> KVTransferResults:
        """Transfers that have ended since the last call; after each step, also where it began none.

        A failure of a load that is not asynchronous is reported after its own step.
        """
