"""The one place that knows how many KV cache groups there are: it turns calls into one call per group.

Called by `KVCacheManager`. Owns the single-type managers, which share one page pool.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from quire.core.kv_spec import AttentionSpec, KVCacheConfig
from quire.core.request import Request
from quire.core.scheduler_output import NewBlocks
from quire.errors import UnsupportedError
from quire.kv_cache.block_hash import BlockHashFn
from quire.kv_cache.block_pool import BlockPool
from quire.kv_cache.page_counts import longest_sequence, most_blocks, num_blocks_held
from quire.kv_cache.single_type.chunked_local import ChunkedLocalManager
from quire.kv_cache.single_type.full_attention import FullAttentionManager
from quire.kv_cache.single_type.local_attention import LocalAttentionManager
from quire.kv_cache.single_type.row_blocks import NO_IDS
from quire.kv_cache.single_type.sliding_window import SlidingWindowManager


class KVCacheCoordinator:
    """Pages of all groups: at most one that keeps whole sequences, which is the first, and others that free pages.

    Args:
        max_chunk_tokens: most tokens of one request that a step computes.
    """

    def __init__(
        self,
        kv_cache_config: KVCacheConfig,
        pool: BlockPool,
        max_num_seqs: int,
        max_model_len: int,
        hash_fn: BlockHashFn,
        max_chunk_tokens: int,
    ) -> None:
        specs = [group.spec for group in kv_cache_config.groups]
        if not specs or any(spec.num_tokens_seen is None for spec in specs[1:]):
            raise UnsupportedError(
                f"{len(specs)} KV cache groups: one that keeps whole sequences comes first, and there is one at most",
                hint="make the plan with kv_cache.planning.plan_kv_cache",
            )
        self._block_size = kv_cache_config.block_size
        self._pool = pool
        self._most = [most_blocks(spec, max_chunk_tokens) for spec in specs]
        self._full: FullAttentionManager | None = None
        if specs[0].num_tokens_seen is None:
            self._full = FullAttentionManager(pool, self._block_size, max_num_seqs, max_model_len, hash_fn)
        self._local = [
            _make_local(spec, pool, max_num_seqs, max_model_len, limit)
            for spec, limit in zip(specs, self._most, strict=True)
            if limit is not None
        ]
        self._groups: Sequence[FullAttentionManager | LocalAttentionManager] = [
            *([] if self._full is None else [self._full]),
            *self._local,
        ]

    @property
    def longest_sequence(self) -> int | None:
        """Pages of tokens of the longest request that runs when alone; None = there is no longest one."""
        return longest_sequence(self._pool.num_usable_blocks, self._most)

    @property
    def uses_hashes(self) -> bool:
        """Whether cached pages are found by the hashes of a request's pages."""
        return self._full is not None

    def num_blocks_held(self, num_tokens: np.ndarray) -> np.ndarray:
        """[.] most pages, all groups together, that requests of `num_tokens` ([.]) tokens hold at once."""
        return np.asarray(num_blocks_held(-(-num_tokens // self._block_size), self._most))

    def find(self, request: Request, max_pages: int) -> tuple[tuple[np.ndarray, ...], int]:
        """The longest cached prefix of a request, at most `max_pages` pages.

        Returns:
            Per group, [.] int32: the pages of it that the next query sees; and its length in pages.
        """
        full_ids = None if self._full is None else self._full.find(request, max_pages)
        num_pages = max_pages if full_ids is None else len(full_ids)
        if not self._local:
            assert full_ids is not None, "there is a group"
            return (full_ids,), num_pages
        names = self._pool.prefix_pages.tree.find(request.token_ids, request.extra_keys, num_pages)
        agreed = len(names)
        while True:  # a prefix that one group shortens may be too long for another in turn
            shortest = min(group.longest_hit(names, agreed) for group in self._local)
            if shortest == agreed:
                break
            agreed = shortest
        local_ids = [group.cached_block_ids(names, agreed) for group in self._local]
        return (*([] if full_ids is None else [full_ids[:agreed]]), *local_ids), agreed

    def num_new_blocks(self, num_cached_tokens: int, num_tokens: int) -> int:
        """Free pages that a request takes behind a cached prefix to hold `num_tokens` tokens, over all groups."""
        return sum(group.num_new_blocks(num_cached_tokens, num_tokens) for group in self._groups)

    def computed_pages(self, row: int, num_tokens: int) -> tuple[np.ndarray, ...] | None:
        """Per group, the pages with those of a row's first `num_tokens` tokens that a query after them sees.

        None when one of them is freed.
        """
        pages = [group.computed_pages(row, num_tokens) for group in self._groups]
        found = tuple(block_ids for block_ids in pages if block_ids is not None)
        return found if len(found) == len(pages) else None

    def num_missing_blocks(self, rows: np.ndarray, num_tokens: np.ndarray) -> np.ndarray:
        """[num_groups, num_rows] pages that rows lack to hold `num_tokens` tokens."""
        if not self._local:
            return self._groups[0].num_missing_blocks(rows, num_tokens)[None]
        return np.stack([group.num_missing_blocks(rows, num_tokens) for group in self._groups])

    def append(self, rows: np.ndarray, num_missing: np.ndarray) -> tuple[NewBlocks, ...]:
        """Give each row `num_missing` ([num_groups, num_rows]) pages more; they must be free."""
        return tuple(group.append(rows, missing) for group, missing in zip(self._groups, num_missing, strict=True))

    def place(
        self, row: int, request: Request, cached_block_ids: tuple[np.ndarray, ...], num_cached: int, num_tokens: int
    ) -> tuple[np.ndarray, ...]:
        """Give an empty row a prefix of `num_cached` tokens, then free pages up to `num_tokens`; all its pages."""
        # What is cached in one group must not be taken for another.
        if self._full is not None:
            self._full.share(row, request, cached_block_ids[0])
        first_local = len(self._groups) - len(self._local)
        for group, block_ids in zip(self._local, cached_block_ids[first_local:], strict=True):
            group.share(row, request, block_ids, num_cached // self._block_size)
        return tuple(group.extend(row, num_tokens) for group in self._groups)

    def cached_in_full(self, cached_block_ids: tuple[np.ndarray, ...]) -> np.ndarray:
        """Of a cached prefix the pages of the group that keeps whole sequences; none where there is no such group."""
        return NO_IDS if self._full is None else cached_block_ids[0]

    def num_blocks_to_restore(self, num_cached: int, num_freed: Sequence[int], num_tokens: int) -> int:
        """Free pages that `restore` takes."""
        num_kept = num_cached + sum(num_freed[len(self._groups) - len(self._local) :])
        return -(-num_tokens // self._block_size) * len(self._groups) - num_kept

    def restore(
        self, row: int, request: Request, cached_block_ids: np.ndarray, num_freed: Sequence[int], num_tokens: int
    ) -> tuple[np.ndarray, ...]:
        """Give an empty row pages up to `num_tokens`, but for `num_freed` leading ones per group that frees pages."""
        if self._full is not None:
            self._full.share(row, request, cached_block_ids)
        for group, freed in zip(self._local, num_freed[len(self._groups) - len(self._local) :], strict=True):
            group.share(row, request, NO_IDS, freed)
        return tuple(group.extend(row, num_tokens) for group in self._groups)

    def block_ids(self, row: int) -> tuple[np.ndarray, ...]:
        """Pages of a row, in order; the null page where one was freed."""
        return tuple(group.block_ids(row) for group in self._groups)

    def publish(self, rows: np.ndarray, num_computed_tokens: np.ndarray, token_ids: np.ndarray) -> None:
        """Make pages that are full and computed findable."""
        for group in self._groups:
            group.publish(rows, num_computed_tokens, token_ids)

    def free_passed(self, rows: np.ndarray, num_computed_tokens: np.ndarray) -> None:
        """Free the pages of these rows that no later query sees."""
        for group in self._local:
            group.free_passed(rows, num_computed_tokens)

    def is_computing(self, prefix_id: int, page: int, block_hash: bytes) -> bool:
        """Whether a row is about to fill and publish page number `page`, which follows a cached prefix."""
        return self._full is not None and self._full.is_computing(prefix_id, page, block_hash)

    def num_known_pages(self, request: Request, max_pages: int) -> int:
        """Of how many first pages of a request windowed groups know the prefix, whether or not they still hold them."""
        return len(self._pool.prefix_pages.tree.find(request.token_ids, request.extra_keys, max_pages))

    def free(self, row: int) -> None:
        """Give up the row's pages."""
        for group in self._groups:
            group.free(row)


def _make_local(
    spec: AttentionSpec, pool: BlockPool, max_num_seqs: int, max_model_len: int, limit: int
) -> LocalAttentionManager:
    assert spec.num_tokens_seen is not None, "a group whose pages are bounded sees so many tokens"
    manager = SlidingWindowManager if spec.attention_chunk_size is None else ChunkedLocalManager
    return manager(
        pool, spec.block_size, max_num_seqs, max_model_len, num_tokens_seen=spec.num_tokens_seen, most_blocks=limit
    )
