"""The one place that knows how many KV cache groups there are: it turns calls into one call per group.

Called by `KVCacheManager`. Owns the single-type managers, which share one page pool.
"""

from __future__ import annotations

import numpy as np

from quire.core.kv_spec import KVCacheConfig
from quire.core.request import Request
from quire.core.scheduler_output import NewBlocks
from quire.errors import UnsupportedError
from quire.kv_cache.block_hash import BlockHashFn
from quire.kv_cache.block_pool import BlockPool
from quire.kv_cache.single_type.full_attention import FullAttentionManager


class KVCacheCoordinator:
    """Pages of all groups. One group of full attention today; answers are tuples by group already."""

    def __init__(
        self,
        kv_cache_config: KVCacheConfig,
        pool: BlockPool,
        max_num_seqs: int,
        max_model_len: int,
        hash_fn: BlockHashFn,
    ) -> None:
        if len(kv_cache_config.groups) != 1:
            raise UnsupportedError(
                f"{len(kv_cache_config.groups)} KV cache groups; one is supported",
                hint="make the plan with kv_cache.planning.plan_kv_cache",
            )
        self._group = FullAttentionManager(pool, kv_cache_config.block_size, max_num_seqs, max_model_len, hash_fn)

    def num_missing_blocks(self, rows: np.ndarray, num_tokens: np.ndarray) -> np.ndarray:
        """[num_rows] pages that rows lack to hold `num_tokens` tokens, over all groups."""
        return self._group.num_missing_blocks(rows, num_tokens)

    def append(self, rows: np.ndarray, num_missing: np.ndarray) -> tuple[NewBlocks, ...]:
        """Give each row `num_missing` pages more; they must be free."""
        return (self._group.append(rows, num_missing),)

    def place(
        self, row: int, request: Request, cached_block_ids: tuple[np.ndarray, ...], num_tokens: int
    ) -> tuple[np.ndarray, ...]:
        """Give an empty row cached pages, then free ones up to `num_tokens`; all its pages."""
        return (self._group.place(row, request, cached_block_ids[0], num_tokens),)

    def block_ids(self, row: int) -> tuple[np.ndarray, ...]:
        """Pages of a row, in order."""
        return (self._group.block_ids(row),)

    def publish(self, rows: np.ndarray, num_computed_tokens: np.ndarray, token_ids: np.ndarray) -> None:
        """Make pages that are full and computed findable."""
        self._group.publish(rows, num_computed_tokens, token_ids)

    def is_computing(self, prefix_id: int, page: int, block_hash: bytes) -> bool:
        """Whether a row is about to fill and publish page number `page`, which follows a cached prefix."""
        return self._group.is_computing(prefix_id, page, block_hash)

    def free(self, row: int) -> None:
        """Give up the row's pages."""
        self._group.free(row)
