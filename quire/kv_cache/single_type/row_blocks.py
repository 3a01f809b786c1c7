"""The block table of one group, by row: what managers of every kind share.

Subclassed by the single-type managers. Owns which blocks each row holds. A manager is made from a spec of its kind,
what all managers of a cache share (`ManagerParts`) and the number of its group; `managers` has the table.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from quire.core.kv_spec import KVCacheSpec
from quire.core.scheduler_output import NewBlocks
from quire.kv_cache.block_pool import NULL_BLOCK_ID, BlockPool
from quire.kv_cache.row_prefixes import FilledBlocks, spread

NO_IDS = np.empty(0, dtype=np.int32)
NO_BLOCKS = NewBlocks(NO_IDS, NO_IDS, NO_IDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class ManagerParts:
    """What the managers of a cache share.

    Attributes:
        max_num_seqs: number of rows.
        max_model_len: most tokens of a row.
        max_chunk_tokens: most tokens of one row that a step computes.
        pool_of_group: the pool of block ids of each group.
    """

    pool: BlockPool
    max_num_seqs: int
    max_model_len: int
    max_chunk_tokens: int
    pool_of_group: tuple[int, ...]


class RowBlocks(ABC):
    """Block i of a row holds its tokens i * block_size .. (i + 1) * block_size - 1, unless its kind says otherwise."""

    def __init__(self, spec: KVCacheSpec, parts: ManagerParts, group: int) -> None:
        block_size, max_num_seqs = spec.block_size, parts.max_num_seqs
        self._pool = parts.pool
        self._pool_number = parts.pool_of_group[group]
        self._block_size = block_size
        self._block_table = np.zeros((max_num_seqs, -(-parts.max_model_len // block_size)), dtype=np.int32)
        self._num_blocks = np.zeros(max_num_seqs, dtype=np.int32)
        self._index = parts.pool.prefix_index
        self._group = group
        self._blocks = self._index.blocks[group]

    def block_ids(self, row: int) -> np.ndarray:
        """Blocks of a row, in order, [num_blocks] int32, the null block where one was freed; not to be written."""
        return self._block_table[row, : self._num_blocks[row]]

    def first_block(self, num_tokens: int) -> int:
        """First block that a query after `num_tokens` tokens sees."""
        return 0

    def computed_blocks(self, row: int, num_tokens: int) -> np.ndarray | None:
        """Blocks with those of a row's first `num_tokens` tokens that a query after them sees, a copy; None = freed."""
        block_ids = np.array(self.block_ids(row)[self.first_block(num_tokens) : -(-num_tokens // self._block_size)])
        return block_ids if block_ids.all() else None

    def num_new_blocks(self, num_shared: int, num_blocks: int, num_tokens: int) -> int:
        """Free blocks that a row takes to hold `num_tokens` tokens, or as many as it holds at once.

        Args:
            num_shared, num_pages: of what it begins with (`share`).
        """
        return -(-num_tokens // self._block_size) - num_blocks

    def num_missing_blocks(self, rows: np.ndarray, num_tokens: np.ndarray) -> np.ndarray:
        """[num_rows] blocks that rows lack to hold `num_tokens` ([num_rows]) tokens."""
        needed = (num_tokens + (self._block_size - 1)) // self._block_size
        missing: np.ndarray = np.maximum(needed - self._num_blocks[rows], 0)
        return missing

    def share(self, row: int, cached_block_ids: np.ndarray, num_blocks: int) -> None:
        """Give an empty row the last blocks of a prefix of `num_blocks` blocks; those before them count as freed."""
        num_freed = num_blocks - len(cached_block_ids)
        self._pool.share(cached_block_ids)
        self._block_table[row, :num_freed] = NULL_BLOCK_ID
        self._block_table[row, num_freed:num_blocks] = cached_block_ids
        self._num_blocks[row] = num_blocks

    def append(self, rows: np.ndarray, num_missing: np.ndarray) -> NewBlocks:
        """Give each row `num_missing` ([num_rows]) blocks more; they must be free."""
        if not np.count_nonzero(num_missing):
            return NO_BLOCKS
        due = np.flatnonzero(num_missing)
        rows, num_missing = rows[due], num_missing[due]
        flat_rows, columns = spread(rows, self._num_blocks[rows], num_missing)
        block_ids = self._pool.take(len(flat_rows), self._pool_number)
        self._block_table[flat_rows, columns] = block_ids
        self._num_blocks[rows] += num_missing.astype(np.int32)
        return NewBlocks(flat_rows.astype(np.int32), columns.astype(np.int32), block_ids)

    def extend(self, row: int, num_tokens: int) -> np.ndarray:
        """Give a row free blocks up to `num_tokens` tokens; all its blocks, a copy."""
        held, num_blocks = int(self._num_blocks[row]), -(-num_tokens // self._block_size)
        if num_blocks > held:
            self._block_table[row, held:num_blocks] = self._pool.take(num_blocks - held, self._pool_number)
            self._num_blocks[row] = num_blocks
        return np.array(self.block_ids(row))

    def free_beyond(self, rows: np.ndarray, num_tokens: np.ndarray) -> None:
        """Give up the rows' blocks that hold none of their first `num_tokens` tokens; none of them was published."""
        num_blocks = -(-num_tokens // self._block_size)
        for at in (num_blocks < self._num_blocks[rows]).nonzero()[0].tolist():
            row, first = int(rows[at]), int(num_blocks[at])
            self._pool.free(self._block_table[row, first : self._num_blocks[row]])
            self._num_blocks[row] = first

    def publish(self, filled: FilledBlocks) -> None:
        """Make blocks findable that are full and computed; those that were freed before that are left out."""
        block_ids = self._block_table[filled.rows, filled.blocks]
        if block_ids.all():
            self._index.publish(self._group, filled.nodes, block_ids)
            return
        held = np.flatnonzero(block_ids)
        self._index.publish(self._group, [filled.nodes[i] for i in held.tolist()], block_ids[held])

    def free_out_of_window(self, rows: np.ndarray, num_computed_tokens: np.ndarray) -> None:  # noqa: B027 (most kinds free none)
        """Free the blocks of these distinct rows that no later query sees."""

    @abstractmethod
    def longest_hit(self, nodes: Sequence[int], max_blocks: int) -> int:
        """The most blocks, up to `max_blocks`, that a cached prefix of a request may have.

        Args:
            nodes: the prefixes that end with each of the request's blocks, in order.
        """

    def cached_block_ids(self, nodes: Sequence[int], num_blocks: int) -> np.ndarray:
        """[.] int32; the blocks of a cached prefix of `num_blocks` blocks that the next query sees."""
        first = self.first_block(num_blocks * self._block_size)
        return np.array([self._blocks[node] for node in nodes[first:num_blocks]], dtype=np.int32)

    def blocks_to_store(self, row: int, nodes: Sequence[int]) -> np.ndarray:
        """[len(nodes)] int32: the block with the end of each prefix of a row, 0 = there is none (any longer).

        Args:
            nodes: the prefixes that end with each of the row's first blocks, in order; all are computed.
        """
        return np.array(self._block_table[row, : len(nodes)])

    def note_loaded(self, row: int, num_blocks: int) -> None:  # noqa: B027 (most kinds publish what their table has)
        """The prefix of `num_blocks` blocks that a row was just given was loaded, and is to be published."""

    def free(self, row: int) -> None:
        """Give up the row's blocks; cached ones stay findable until they are taken."""
        self._pool.free(self.block_ids(row))
        self._num_blocks[row] = 0
