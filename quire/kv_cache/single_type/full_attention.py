"""Pages of layers that keep every token: full attention, and sliding windows that are masked, not freed.

Called by the coordinator. Owns the block table by row, and how far each row is published.
"""

from __future__ import annotations

import numpy as np

from quire.core.request import Request
from quire.core.scheduler_output import NewBlocks
from quire.kv_cache.block_hash import ROOT_HASH, TOKEN_BYTES, BlockHashFn, token_bytes
from quire.kv_cache.block_pool import BlockPool
from quire.kv_cache.prefix_index import ROOT_PREFIX_ID

_NO_IDS = np.empty(0, dtype=np.int32)
NO_BLOCKS = NewBlocks(_NO_IDS, _NO_IDS, _NO_IDS)


class FullAttentionManager:
    """Page i of a row holds its tokens i * block_size .. (i + 1) * block_size - 1."""

    def __init__(
        self, pool: BlockPool, block_size: int, max_num_seqs: int, max_model_len: int, hash_fn: BlockHashFn
    ) -> None:
        max_blocks_per_req = -(-max_model_len // block_size)
        self._pool = pool
        self._block_size = block_size
        self._hash_fn = hash_fn
        self._offsets = np.arange(block_size)
        self._block_table = np.zeros((max_num_seqs, max_blocks_per_req), dtype=np.int32)
        self._num_blocks = np.zeros(max_num_seqs, dtype=np.int32)
        self._num_published = np.zeros(max_num_seqs, dtype=np.int32)
        self._last_prefix_id = [ROOT_PREFIX_ID] * max_num_seqs
        self._requests: list[Request | None] = [None] * max_num_seqs

    def block_ids(self, row: int) -> np.ndarray:
        """Pages of a row, in order, [num_blocks] int32; not to be written."""
        return self._block_table[row, : self._num_blocks[row]]

    def num_missing_blocks(self, rows: np.ndarray, num_tokens: np.ndarray) -> np.ndarray:
        """[num_rows] pages that rows lack to hold `num_tokens` ([num_rows]) tokens."""
        needed = -(-num_tokens // self._block_size)
        missing: np.ndarray = np.maximum(needed - self._num_blocks[rows], 0)
        return missing

    def append(self, rows: np.ndarray, num_missing: np.ndarray) -> NewBlocks:
        """Give each row `num_missing` ([num_rows]) pages more; they must be free."""
        due = np.flatnonzero(num_missing)
        if not len(due):
            return NO_BLOCKS
        rows, num_missing = rows[due], num_missing[due]
        flat_rows = np.repeat(rows, num_missing)
        columns = _ragged_arange(self._num_blocks[rows], num_missing)
        block_ids = self._pool.take(len(flat_rows))
        self._block_table[flat_rows, columns] = block_ids
        self._num_blocks[rows] += num_missing.astype(np.int32)
        return NewBlocks(flat_rows.astype(np.int32), columns.astype(np.int32), block_ids)

    def place(self, row: int, request: Request, cached_block_ids: np.ndarray, num_tokens: int) -> np.ndarray:
        """Give an empty row the pages of a cached prefix, then free ones up to `num_tokens`; all its pages."""
        num_cached, num_blocks = len(cached_block_ids), -(-num_tokens // self._block_size)
        self._pool.share(cached_block_ids)
        self._block_table[row, :num_cached] = cached_block_ids
        self._block_table[row, num_cached:num_blocks] = self._pool.take(num_blocks - num_cached)
        self._num_blocks[row] = num_blocks
        # Pages shared with a running request may not be findable: such a row publishes from its first page on.
        is_findable = num_cached > 0 and bool(self._pool.prefix_index.is_cached[cached_block_ids[-1]])
        self._num_published[row] = num_cached if is_findable else 0
        self._last_prefix_id[row] = (
            self._pool.prefix_index.prefix_id(cached_block_ids) if is_findable else ROOT_PREFIX_ID
        )
        self._requests[row] = request
        return np.array(self.block_ids(row))

    def publish(self, rows: np.ndarray, num_computed_tokens: np.ndarray, token_ids: np.ndarray) -> None:
        """Make pages that are full and computed findable.

        Args:
            rows: [num_rows] distinct rows.
            num_computed_tokens: [num_rows] tokens whose keys and values are in the cache.
            token_ids: [max_num_seqs, max_model_len] int32; tokens by row.
        """
        num_full = num_computed_tokens // self._block_size
        num_due = num_full - self._num_published[rows]
        due = np.flatnonzero(num_due > 0)
        if not len(due):
            return
        flat_rows = np.repeat(rows[due], num_due[due])
        pages = _ragged_arange(self._num_published[rows[due]], num_due[due])
        block_ids = self._block_table[flat_rows, pages]
        page_tokens = token_ids[flat_rows[:, None], pages[:, None] * self._block_size + self._offsets]
        self._pool.prefix_index.write_tokens(block_ids, page_tokens)
        data, page_bytes = token_bytes(page_tokens), TOKEN_BYTES * self._block_size
        for i, (row, page, block_id) in enumerate(
            zip(flat_rows.tolist(), pages.tolist(), block_ids.tolist(), strict=True)
        ):
            self._publish_page(row, page, block_id, data[i * page_bytes : (i + 1) * page_bytes])
        self._num_published[rows[due]] = num_full[due]

    def _publish_page(self, row: int, page: int, block_id: int, tokens: bytes) -> None:
        request = self._requests[row]
        assert request is not None, "a row that computed tokens belongs to a request"
        keys = request.extra_keys.get(page, ()) if request.extra_keys else ()
        hashes = request.block_hashes
        if page == len(hashes):
            hashes.append(self._hash_fn(hashes[-1] if hashes else ROOT_HASH, tokens, keys))
        prefix_ids = self._last_prefix_id
        prefix_ids[row] = self._pool.prefix_index.publish(block_id, hashes[page], prefix_ids[row], keys)

    def free(self, row: int) -> None:
        """Give up the row's pages; cached ones stay findable until they are taken."""
        self._pool.free(self.block_ids(row))
        self._num_blocks[row] = 0
        self._requests[row] = None


def _ragged_arange(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """starts[0], starts[0] + 1, ... (counts[0] of them), then starts[1], ..."""
    ends = np.cumsum(counts)
    within = np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - counts, counts)
    indices: np.ndarray = np.repeat(starts, counts) + within
    return indices
