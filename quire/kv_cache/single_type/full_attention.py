"""Pages of layers that keep every token: full and latent attention, and windows that are masked, not freed.

Called by the coordinator. Owns the block table by row, and how far each row is published.
"""

from __future__ import annotations

import numpy as np

from quire.core.kv_spec import KVCacheSpec
from quire.core.request import Request
from quire.kv_cache.block_hash import ROOT_HASH, bytes_by_page
from quire.kv_cache.prefix_index import ROOT_PREFIX_ID
from quire.kv_cache.single_type.row_blocks import NEVER, ManagerParts, RowBlocks

_MAX_ROWS_LOOKED_AT = 64


class FullAttentionManager(RowBlocks):
    """A row keeps all its pages; cached ones are found through the pool's prefix index."""

    def __init__(self, spec: KVCacheSpec, parts: ManagerParts) -> None:
        super().__init__(spec, parts)
        self._hash_fn = parts.hash_fn
        self._last_prefix_id = [ROOT_PREFIX_ID] * parts.max_num_seqs
        self._num_published[:] = NEVER

    def find(self, request: Request, max_pages: int) -> np.ndarray:
        """Pages of the longest cached prefix of a request, at most `max_pages`, [num_pages] int32."""
        return self._pool.prefix_index.find(request.block_hashes[:max_pages], request.token_ids, request.extra_keys)

    def share(self, row: int, request: Request, cached_block_ids: np.ndarray, num_cached_pages: int) -> None:
        """As `RowBlocks`; these are all pages of the prefix."""
        num_cached = len(cached_block_ids)
        self._pool.share(cached_block_ids)
        self._block_table[row, :num_cached] = cached_block_ids
        self._num_blocks[row] = num_cached
        # Pages shared with a running request may not be findable: such a row publishes from its first page on.
        is_findable = num_cached > 0 and bool(self._pool.prefix_index.is_cached[cached_block_ids[-1]])
        self._num_published[row] = num_cached if is_findable else 0
        if request.message.sampling_params.no_store:
            self._num_published[row] = NEVER
        self._last_prefix_id[row] = (
            self._pool.prefix_index.prefix_id(cached_block_ids) if is_findable else ROOT_PREFIX_ID
        )
        self._requests[row] = request

    def _publish_pages(self, rows: list[int], pages: list[int], block_ids: np.ndarray, page_tokens: np.ndarray) -> None:
        """As `RowBlocks`. In a decode step of many rows this loop is the largest part of the scheduler's time."""
        index, hash_fn = self._pool.prefix_index, self._hash_fn
        requests, prefix_ids = self._requests, self._last_prefix_id
        index.write_tokens(block_ids, page_tokens)
        due = zip(rows, pages, block_ids.tolist(), bytes_by_page(page_tokens), strict=True)
        for row, page, block_id, tokens in due:
            request = requests[row]
            assert request is not None, "a row that computed tokens belongs to a request"
            hashes, extra_keys = request.block_hashes, request.extra_keys
            keys = extra_keys.get(page, ()) if extra_keys else ()
            if page == len(hashes):
                hashes.append(hash_fn(hashes[-1] if hashes else ROOT_HASH, tokens, keys))
            prefix_ids[row] = index.publish(block_id, hashes[page], prefix_ids[row], keys, request.message.template_id)

    def is_computing(self, prefix_id: int, page: int, block_hash: bytes) -> bool:
        """Whether a row is about to fill and publish page number `page`, which follows a cached prefix."""
        prefix_ids = self._last_prefix_id
        rows = np.flatnonzero(self._num_published == page)[:_MAX_ROWS_LOOKED_AT].tolist()
        hashes = [self._request_on(row).block_hashes for row in rows if prefix_ids[row] == prefix_id]
        return any(page < len(names) and names[page] == block_hash for names in hashes)

    def free(self, row: int) -> None:
        """Give up the row's pages; cached ones stay findable until they are taken."""
        self._pool.free(self.block_ids(row))
        self._num_blocks[row] = 0
        self._num_published[row] = NEVER
        self._requests[row] = None
