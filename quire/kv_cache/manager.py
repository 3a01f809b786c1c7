"""KVCacheManager: all that the scheduler knows of the KV cache.

Called by the scheduler. Owns the page pool and, through the coordinator, the block tables by row. Pages are
asked for in tokens; answers are messages for the worker. Only pages whose keys and values were computed in an
executed step are ever visible to other requests.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from quire.core.kv_spec import KVCacheConfig
from quire.core.request import ExtraKeys, Request
from quire.core.scheduler_output import NewBlocks, PageCopies
from quire.kv_cache.block_hash import BlockHashFn, hash_full_pages, sha256_block_hash
from quire.kv_cache.block_pool import BlockPool
from quire.kv_cache.coordinator import KVCacheCoordinator
from quire.kv_cache.page_copies import PendingCopies


@dataclass(frozen=True, slots=True)
class CachedPrefix:
    """The beginning of a request that is in the cache: full pages per group, and how many tokens there are.

    Attributes:
        partial_block_ids: per group: the page with the tokens after the full pages, which is copied, as the request
            writes on in it; empty = there are none.
    """

    block_ids: tuple[np.ndarray, ...]
    num_tokens: int
    partial_block_ids: tuple[int, ...] = ()

    def all_block_ids(self) -> np.ndarray:
        """Every page that holds some of it, [num_blocks] int32, in the order of its tokens within each group."""
        return np.concatenate([*self.block_ids, np.array(self.partial_block_ids, dtype=np.int32)])


class KVCacheManager:
    """Pages of the admitted requests, by row, and the prefix cache.

    Args:
        kv_cache_config: number and size of pages.
        enable_prefix_caching: share full pages between requests that begin alike.
        max_num_seqs: number of rows.
        max_model_len: most tokens of a row.
        hash_fn: names a page by its content.
    """

    def __init__(
        self,
        kv_cache_config: KVCacheConfig,
        *,
        enable_prefix_caching: bool,
        max_num_seqs: int,
        max_model_len: int,
        hash_fn: BlockHashFn = sha256_block_hash,
    ) -> None:
        self.block_size = kv_cache_config.block_size
        self._is_caching = enable_prefix_caching
        self._hash_fn = hash_fn
        self._pool = BlockPool(kv_cache_config.num_blocks, self.block_size)
        self._copies = PendingCopies(self._pool)
        self._coordinator = KVCacheCoordinator(kv_cache_config, self._pool, max_num_seqs, max_model_len, hash_fn)

    @property
    def num_usable_blocks(self) -> int:
        """Pages there are, the null page excluded."""
        return self._pool.num_usable_blocks

    @property
    def num_free_blocks(self) -> int:
        """Pages that nobody uses, cached ones included."""
        return self._pool.num_free_blocks

    @property
    def usage(self) -> float:
        """Share of pages in use, in [0, 1]."""
        return self._pool.usage

    @property
    def max_tokens_per_request(self) -> int:
        """Longest request that runs when alone: its last token is sampled, but never written to the cache."""
        return self._pool.num_usable_blocks * self.block_size + 1

    def hash_prompt(self, request: Request) -> None:
        """Name the full pages of a request that has just arrived."""
        if self._is_caching:
            request.extra_keys = self._extra_keys(request)
            request.block_hashes = hash_full_pages(
                request.token_ids, self.block_size, request.extra_keys, self._hash_fn
            )

    def _extra_keys(self, request: Request) -> dict[int, ExtraKeys]:
        """A salt belongs to the first page that is not wholly shared; the pages after it are tied to it."""
        message = request.message
        if message.cache_salt is None:
            return {}
        first = min(message.num_shared_tokens, request.num_prompt_tokens) // self.block_size
        return {max(0, first): (("cache_salt", message.cache_salt),)}

    def get_computed_blocks(self, request: Request) -> CachedPrefix:
        """The longest cached prefix of a request without a row; at least one token is left to compute."""
        if not (self._is_caching and request.may_read_prefix_cache):
            return CachedPrefix((np.empty(0, dtype=np.int32),), 0)
        max_pages = (len(request.token_ids) - 1) // self.block_size
        block_ids = self._pool.prefix_index.find(
            request.block_hashes[:max_pages], request.token_ids, request.extra_keys
        )
        return CachedPrefix((block_ids,), len(block_ids) * self.block_size)

    def num_blocks_to_place(self, prefix: CachedPrefix, num_tokens: int) -> int:
        """By how many pages the free list shrinks when a request is placed with room for `num_tokens`."""
        num_new = sum(-(-num_tokens // self.block_size) - len(block_ids) for block_ids in prefix.block_ids)
        return num_new + sum(self._pool.num_free_among(block_ids) for block_ids in prefix.block_ids)

    def place(self, row: int, request: Request, prefix: CachedPrefix, num_tokens: int) -> tuple[np.ndarray, ...]:
        """Give a request's row its cached prefix and pages up to `num_tokens`; they must be free.

        Returns:
            Per group: [num_blocks] int32, all pages of the row.
        """
        block_ids = self._coordinator.place(row, request, prefix.block_ids, num_tokens)
        if prefix.partial_block_ids:
            targets = [ids[len(full)] for ids, full in zip(block_ids, prefix.block_ids, strict=True)]
            self._copies.add(row, np.array(prefix.partial_block_ids, np.int32), np.array(targets, np.int32))
        return block_ids

    def shared_prefix(self, row: int, num_tokens: int) -> CachedPrefix:
        """The first `num_tokens` tokens of a placed row, for another request to begin with; they are computed."""
        num_full = num_tokens // self.block_size
        tables = self._coordinator.block_ids(row)
        partial = () if num_tokens % self.block_size == 0 else tuple(int(ids[num_full]) for ids in tables)
        return CachedPrefix(tuple(np.array(ids[:num_full]) for ids in tables), num_tokens, partial)

    def keep(self, prefix: CachedPrefix) -> None:
        """Become a user of pages in use, so that they stay when their requests leave."""
        self._pool.share(prefix.all_block_ids())

    def let_go(self, prefix: CachedPrefix) -> None:
        """The end of `keep`."""
        self._pool.free(prefix.all_block_ids())

    def take_page_copies(self) -> PageCopies:
        """The copies that the worker has to make before it computes; each is given out once."""
        return self._copies.take()

    def num_missing_blocks(self, rows: np.ndarray, num_tokens: np.ndarray) -> np.ndarray:
        """[num_rows] pages that placed rows lack to hold `num_tokens` ([num_rows]) tokens."""
        return self._coordinator.num_missing_blocks(rows, num_tokens)

    def allocate(self, rows: np.ndarray, num_missing: np.ndarray) -> tuple[NewBlocks, ...]:
        """Give each of these placed rows `num_missing` ([num_rows]) pages more; they must be free."""
        return self._coordinator.append(rows, num_missing)

    def get_block_ids(self, row: int) -> tuple[np.ndarray, ...]:
        """Per group: pages of a row, in order; not to be written."""
        return self._coordinator.block_ids(row)

    def cache_full_blocks(self, rows: np.ndarray, num_computed_tokens: np.ndarray, token_ids: np.ndarray) -> None:
        """Publish the pages of these rows that an executed step filled.

        Args:
            rows: [num_rows] distinct rows.
            num_computed_tokens: [num_rows] tokens whose keys and values are in the cache.
            token_ids: [max_num_seqs, max_model_len] int32; tokens by row.
        """
        if self._is_caching:
            self._coordinator.publish(rows, num_computed_tokens, token_ids)

    def free(self, row: int) -> None:
        """Give up the row's pages; cached ones stay findable until they are taken."""
        self._copies.drop(row)
        self._coordinator.free(row)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached pages; False, and nothing done, while any page is in use."""
        return self._pool.reset_prefix_cache()
