"""Free blocks in the order they will be given out: blocks that hold nothing first, then the least recently used.

Owned by the block pool. Every call is a few array operations, whatever the number of blocks:

- blocks that hold nothing reusable are a stack (last freed, first taken);
- cached blocks are a log, oldest first. A block that is used again leaves the log by forgetting its position;
  its entry turns stale and is skipped when the head passes it, or dropped when the log is compacted.
"""

from __future__ import annotations

import numpy as np

_NOT_LOGGED = 0  # positions start at 1, so that the position column can stay untouched zero memory


class FreeList:
    """The free blocks of a pool; all are free and plain at first.

    Args:
        num_blocks: of the pool, its null block included.

    Attributes:
        null_id: the null block; the others' ids follow it.
    """

    def __init__(self, num_blocks: int, null_id: int = 0) -> None:
        self._num_blocks = num_blocks
        self.null_id = null_id
        self.reset()

    def reset(self) -> None:
        """Make every block free and plain, the lowest id on top."""
        first, end = self.null_id, self.null_id + self._num_blocks
        self._stack = np.arange(end - 1, first - 1, -1, dtype=np.int32)  # last entry: the null block, above the top
        self._num_stacked = self._num_blocks - 1
        self._log = np.zeros(2 * self._num_blocks + 1, dtype=np.int32)
        self._position = np.zeros(end, dtype=np.int32)
        self._head = self._tail = _NOT_LOGGED + 1
        self._num_logged = 0

    def __len__(self) -> int:
        return self._num_stacked + self._num_logged

    def push_plain(self, block_ids: np.ndarray) -> None:
        """Free blocks that hold nothing reusable; the last one will be taken first."""
        self._stack[self._num_stacked : self._num_stacked + len(block_ids)] = block_ids
        self._num_stacked += len(block_ids)

    def push_cached(self, block_ids: np.ndarray) -> None:
        """Free cached blocks; the first one will be taken first, after all that are logged already."""
        if self._tail + len(block_ids) > len(self._log):
            self._compact()
        end = self._tail + len(block_ids)
        self._log[self._tail : end] = block_ids
        self._position[block_ids] = np.arange(self._tail, end, dtype=np.int32)
        self._tail = end
        self._num_logged += len(block_ids)

    def remove_cached(self, block_ids: np.ndarray) -> None:
        """Take these cached blocks, which are free, back into use."""
        self._position[block_ids] = _NOT_LOGGED
        self._num_logged -= len(block_ids)

    def take(self, num_blocks: int) -> np.ndarray:
        """[num_blocks] int32 blocks in giving order; there must be as many free."""
        assert num_blocks <= len(self), "allocating more blocks than are free"
        num_plain = min(num_blocks, self._num_stacked)
        self._num_stacked -= num_plain
        plain = self._stack[self._num_stacked : self._num_stacked + num_plain][::-1]
        if num_plain == num_blocks:
            return np.array(plain)
        return np.concatenate([plain, *self._take_oldest(num_blocks - num_plain)])

    def eviction_order(self) -> np.ndarray:
        """[num_cached] int32: the free blocks that are cached, the next to be evicted first."""
        return self._live_entries(self._head, self._tail)

    def _take_oldest(self, num_blocks: int) -> list[np.ndarray]:
        taken = []
        while num_blocks:
            stop = min(self._head + num_blocks + 32, self._tail)
            live = self._live_entries(self._head, stop)
            self._head = stop if len(live) <= num_blocks else int(self._position[live[num_blocks]])
            taken.append(live[:num_blocks])
            self.remove_cached(taken[-1])
            num_blocks -= len(taken[-1])
        return taken

    def _live_entries(self, start: int, stop: int) -> np.ndarray:
        entries = self._log[start:stop]
        live: np.ndarray = entries[self._position[entries] == np.arange(start, stop, dtype=np.int32)]
        return live

    def _compact(self) -> None:
        """Drop stale entries. The log holds twice the pool, so this happens once in at least num_blocks pushes."""
        live = self._live_entries(self._head, self._tail)
        self._head, self._tail = _NOT_LOGGED + 1, _NOT_LOGGED + 1 + len(live)
        self._log[self._head : self._tail] = live
        self._position[live] = np.arange(self._head, self._tail, dtype=np.int32)
