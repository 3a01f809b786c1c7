"""Blocks of layers whose queries see only nearby tokens: what lies before these is freed while the row advances.

Subclassed by the kinds that say which tokens those are. Owns the block table by row, and how many blocks of a row are
freed.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import numpy as np

from quire.core.kv_spec import LocalAttentionSpec
from quire.kv_cache.block_pool import NULL_BLOCK_ID
from quire.kv_cache.row_prefixes import spread
from quire.kv_cache.single_type.row_blocks import ManagerParts, RowBlocks


class LocalAttentionManager(RowBlocks):
    """A row holds the blocks that its newest computed query saw, and those behind them.

    That is one query more than the row itself needs: so another request can take over its prompt, of which it computes
    the last token, in the step after the one that computed it.
    """

    def __init__(self, spec: LocalAttentionSpec, parts: ManagerParts, group: int) -> None:
        super().__init__(spec, parts, group)
        self._num_tokens_seen = spec.num_tokens_seen
        self._most_blocks = spec.most_blocks(parts.max_chunk_tokens)
        self._num_freed = np.zeros(parts.max_num_seqs, dtype=np.int32)

    @abstractmethod
    def first_token_seen(self, positions: np.ndarray) -> np.ndarray:
        """[.] position of the oldest token that queries at `positions` ([.]) see, themselves included."""

    def first_block(self, num_tokens: int) -> int:
        """First block that a query after `num_tokens` tokens sees."""
        return int(self.first_token_seen(np.array(num_tokens))) // self._block_size

    def num_missing_blocks(self, rows: np.ndarray, num_tokens: np.ndarray) -> np.ndarray:
        """[num_rows] blocks that rows lack to hold `num_tokens` ([num_rows]) tokens, or the most they ever hold."""
        num_freed = self._num_freed[rows]
        needed = np.minimum(-(-num_tokens // self._block_size) - num_freed, self._most_blocks)
        missing: np.ndarray = np.maximum(needed - (self._num_blocks[rows] - num_freed), 0)
        return missing

    def num_new_blocks(self, num_shared: int, num_blocks: int, num_tokens: int) -> int:
        """As `RowBlocks`."""
        num_freed = num_blocks - num_shared
        return min(-(-num_tokens // self._block_size) - num_freed, self._most_blocks) - num_shared

    def longest_hit(self, nodes: Sequence[int], max_blocks: int) -> int:
        """As `RowBlocks`: the blocks that the next query sees are cached, and the last one in any case."""
        end = block = max_blocks
        while block > (min(self.first_block(end * self._block_size), end - 1) if end else 0):
            block -= 1
            if nodes[block] not in self._blocks:
                end = block
        return end

    def share(self, row: int, cached_block_ids: np.ndarray, num_blocks: int) -> None:
        """As `RowBlocks`."""
        super().share(row, cached_block_ids, num_blocks)
        self._num_freed[row] = num_blocks - len(cached_block_ids)

    def free_out_of_window(self, rows: np.ndarray, num_computed_tokens: np.ndarray) -> None:
        """Free the blocks of these distinct rows that neither their newest computed query saw nor a later one does."""
        first = self.first_token_seen(num_computed_tokens - 1) // self._block_size
        num_due = first - self._num_freed[rows]
        due = np.flatnonzero(num_due > 0)
        if not len(due):
            return
        flat_rows, columns = spread(rows[due], self._num_freed[rows[due]], num_due[due])
        block_ids = self._block_table[flat_rows, columns]
        self._block_table[flat_rows, columns] = NULL_BLOCK_ID
        self._num_freed[rows[due]] = first[due]
        self._pool.free_of_many(block_ids)

    def blocks_to_store(self, row: int, nodes: Sequence[int]) -> np.ndarray:
        """As `RowBlocks`; those that the row has freed as long as they are cached."""
        block_ids = super().blocks_to_store(row, nodes)
        for number in range(int(min(self._num_freed[row], len(nodes)))):
            block_ids[number] = self._blocks.get(nodes[number], NULL_BLOCK_ID)
        return block_ids

    def free(self, row: int) -> None:
        """Give up the row's blocks; cached ones stay findable until they are taken."""
        self._pool.free(self._block_table[row, self._num_freed[row] : self._num_blocks[row]])
        self._num_blocks[row] = self._num_freed[row] = 0
