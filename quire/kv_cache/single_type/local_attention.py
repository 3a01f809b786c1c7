"""Pages of layers whose queries see only nearby tokens: what lies before these is freed while the row advances.

Subclassed by the kinds that say which tokens those are. Owns the block table by row, and how many pages of a row are
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
    """A row holds the pages that its newest computed query saw, and those behind them.

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

    def first_page(self, num_tokens: int) -> int:
        """First page that a query after `num_tokens` tokens sees."""
        return int(self.first_token_seen(np.array(num_tokens))) // self._block_size

    def num_missing_blocks(self, rows: np.ndarray, num_tokens: np.ndarray) -> np.ndarray:
        """[num_rows] pages that rows lack to hold `num_tokens` ([num_rows]) tokens, or the most they will ever hold."""
        num_freed = self._num_freed[rows]
        needed = np.minimum(-(-num_tokens // self._block_size) - num_freed, self._most_blocks)
        missing: np.ndarray = np.maximum(needed - (self._num_blocks[rows] - num_freed), 0)
        return missing

    def num_new_blocks(self, num_shared: int, num_pages: int, num_tokens: int) -> int:
        """As `RowBlocks`."""
        num_freed = num_pages - num_shared
        return min(-(-num_tokens // self._block_size) - num_freed, self._most_blocks) - num_shared

    def longest_hit(self, nodes: Sequence[int], max_pages: int) -> int:
        """As `RowBlocks`: the pages that the next query sees are cached, and the last one in any case."""
        end = page = max_pages
        while page > (min(self.first_page(end * self._block_size), end - 1) if end else 0):
            page -= 1
            if nodes[page] not in self._blocks:
                end = page
        return end

    def share(self, row: int, cached_block_ids: np.ndarray, num_pages: int) -> None:
        """As `RowBlocks`."""
        super().share(row, cached_block_ids, num_pages)
        self._num_freed[row] = num_pages - len(cached_block_ids)

    def free_out_of_window(self, rows: np.ndarray, num_computed_tokens: np.ndarray) -> None:
        """Free the pages of these distinct rows that neither their newest computed query saw nor a later one does."""
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

    def free(self, row: int) -> None:
        """Give up the row's pages; cached ones stay findable until they are taken."""
        self._pool.free(self._block_table[row, self._num_freed[row] : self._num_blocks[row]])
        self._num_blocks[row] = self._num_freed[row] = 0
