"""Blocks in host memory, for requests that lost theirs to others.

Called by the scheduler's `Swapping`. `SwapPool` owns which host blocks are free. Their contents are the worker's.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

NO_HOST_BLOCK = -1


@dataclass(frozen=True, slots=True)
class SwappedBlocks:
    """What of a request is in host memory.

    Attributes:
        num_tokens: its first tokens, whose keys and values these are.
        host_block_ids: per KV cache group: [num_blocks] int32, block by block; -1 where the request held none.
    """

    num_tokens: int
    host_block_ids: tuple[np.ndarray, ...]

    @property
    def num_freed(self) -> tuple[int, ...]:
        """Per KV cache group: blocks, from the first on, that the request held no longer."""
        return tuple(int(np.count_nonzero(ids == NO_HOST_BLOCK)) for ids in self.host_block_ids)

    def held(self) -> np.ndarray:
        """[num_held] int32: the host blocks."""
        block_ids = np.concatenate(self.host_block_ids)
        held: np.ndarray = block_ids[block_ids != NO_HOST_BLOCK]
        return held


class SwapPool:
    """`num_blocks` host blocks from `first_id` on, all for blocks of one pool; all are free at first."""

    def __init__(self, num_blocks: int, first_id: int = 0) -> None:
        self.num_blocks = num_blocks
        self._stack = np.arange(first_id + num_blocks - 1, first_id - 1, -1, dtype=np.int32)
        self._num_free = num_blocks

    @property
    def num_free_blocks(self) -> int:
        """Blocks that hold nothing."""
        return self._num_free

    def take(self, num_blocks: int) -> np.ndarray:
        """[num_blocks] int32 blocks; as many must be free. Those freed last come first: their memory is there."""
        assert num_blocks <= self._num_free, "allocating more host blocks than are free"
        self._num_free -= num_blocks
        return np.array(self._stack[self._num_free : self._num_free + num_blocks][::-1])

    def free(self, block_ids: np.ndarray) -> None:
        """Give blocks back, each once."""
        assert self._num_free + len(block_ids) <= self.num_blocks, (
            "a host block was freed more often than it was allocated"
        )
        self._stack[self._num_free : self._num_free + len(block_ids)] = block_ids[::-1]
        self._num_free += len(block_ids)
