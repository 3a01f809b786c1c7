"""Pages of layers whose queries see only nearby tokens: what lies before these is freed while the row advances.

Subclassed by the kinds that say which tokens those are. Owns the block table by row, how many pages of a row are freed,
and which prefix each row has published.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import numpy as np

from quire.core.kv_spec import LocalAttentionSpec
from quire.core.request import Request
from quire.kv_cache.block_hash import bytes_by_page
from quire.kv_cache.block_pool import NULL_BLOCK_ID
from quire.kv_cache.prefix_tree import ROOT_NAME
from quire.kv_cache.single_type.row_blocks import NEVER, ManagerParts, RowBlocks, spread


class LocalAttentionManager(RowBlocks):
    """A row holds the pages that its newest computed query saw, and those behind them.

    That is one query more than the row itself needs: so another request can take over its prompt, of which it computes
    the last token, in the step after the one that computed it.
    """

    def __init__(self, spec: LocalAttentionSpec, parts: ManagerParts) -> None:
        super().__init__(spec, parts)
        self._num_tokens_seen = spec.num_tokens_seen
        self._most_blocks = spec.most_blocks(parts.max_chunk_tokens)
        self._num_freed = np.zeros(parts.max_num_seqs, dtype=np.int32)
        self._prefixes = parts.pool.prefix_pages
        self._names = [ROOT_NAME] * parts.max_num_seqs
        self._blocks: dict[int, int] = {}

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

    def num_new_blocks(self, num_cached_tokens: int, num_tokens: int) -> int:
        """Free pages that a request takes behind a cached prefix, to hold `num_tokens` tokens or all it ever holds."""
        first = self.first_page(num_cached_tokens)
        num_held = min(-(-num_tokens // self._block_size) - first, self._most_blocks)
        return num_held - (num_cached_tokens // self._block_size - first)

    def longest_hit(self, names: Sequence[int], max_pages: int) -> int:
        """The most pages, up to `max_pages`, that a cached prefix may have.

        Of such a prefix the pages that the next query sees are cached, and its last one in any case.

        Args:
            names: of the prefixes that end with each page, in order.
        """
        end = page = max_pages
        while page > (min(self.first_page(end * self._block_size), end - 1) if end else 0):
            page -= 1
            if names[page] not in self._blocks:
                end = page
        return end

    def cached_block_ids(self, names: Sequence[int], num_pages: int) -> np.ndarray:
        """[.] int32; the pages of a cached prefix of `num_pages` pages that the next query sees."""
        first = self.first_page(num_pages * self._block_size)
        return np.array([self._blocks[name] for name in names[first:num_pages]], dtype=np.int32)

    def share(self, row: int, request: Request, cached_block_ids: np.ndarray, num_cached_pages: int) -> None:
        """Give an empty row the pages that its next query sees of a cached prefix of its request."""
        num_freed = num_cached_pages - len(cached_block_ids)
        self._pool.share(cached_block_ids)
        self._block_table[row, :num_freed] = NULL_BLOCK_ID
        self._block_table[row, num_freed:num_cached_pages] = cached_block_ids
        self._num_freed[row] = num_freed
        self._num_blocks[row] = self._num_published[row] = num_cached_pages
        if request.message.sampling_params.no_store:
            self._num_published[row] = NEVER
        self._requests[row] = request
        self._names[row] = self._prefixes.tree.enter(request.token_ids, request.extra_keys, num_cached_pages)

    def _publish_pages(self, rows: list[int], pages: list[int], block_ids: np.ndarray, page_tokens: np.ndarray) -> None:
        """As `RowBlocks`."""
        due = zip(rows, pages, block_ids.tolist(), bytes_by_page(page_tokens), strict=True)
        for row, page, block_id, tokens in due:
            keys = self._request_on(row).extra_keys.get(page, ())
            name = self._names[row] = self._prefixes.tree.advance(self._names[row], tokens, keys)
            self._prefixes.publish(self._blocks, name, block_id)

    def free_passed(self, rows: np.ndarray, num_computed_tokens: np.ndarray) -> None:
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
        self._num_blocks[row] = self._num_freed[row] = self._num_published[row] = 0
        self._requests[row] = None
        self._prefixes.tree.release(self._names[row])
        self._names[row] = ROOT_NAME
