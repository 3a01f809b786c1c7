"""The one place that knows how many KV cache groups there are: it turns calls into one call per group.

Called by `KVCacheManager`. Owns the single-type managers, which share one page pool.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from quire.core.kv_spec import KVCacheConfig
from quire.core.request import Request
from quire.core.scheduler_output import NewBlocks
from quire.errors import UnsupportedError
from quire.kv_cache.page_counts import longest_sequence, num_blocks_held
from quire.kv_cache.single_type.full_attention import FullAttentionManager
from quire.kv_cache.single_type.local_attention import LocalAttentionManager
from quire.kv_cache.single_type.managers import make_manager
from quire.kv_cache.single_type.row_blocks import NO_IDS, ManagerParts


class KVCacheCoordinator:
    """Pages of all groups: at most one that keeps whole sequences, which is the first, and others that free pages.

    Attributes:
        finds_prefixes: pages of every group can serve another request, so prefixes are worth publishing.
    """

    def __init__(self, kv_cache_config: KVCacheConfig, parts: ManagerParts) -> None:
        specs = [group.spec for group in kv_cache_config.groups]
        if not specs or any(spec.keeps_sequence for spec in specs[1:]):
            raise UnsupportedError(
                f"{len(specs)} KV cache groups: at most one full-attention group is supported, and it comes first",
                hint="make the plan with kv_cache.planning.plan_kv_cache",
            )
        self._block_size = kv_cache_config.block_size
        self._pool = parts.pool
        self._most = [spec.most_blocks(parts.max_chunk_tokens) for spec in specs]
        self.finds_prefixes = all(spec.is_shareable for spec in specs)
        groups = [make_manager(spec, parts) for spec in specs]
        self._full = groups[0] if isinstance(groups[0], FullAttentionManager) else None
        self._local = [group for group in groups if isinstance(group, LocalAttentionManager)]
        self._groups = groups

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

    def num_blocks_shared(self, num_tokens: int) -> int:
        """Full pages that requests with the same first `num_tokens` tokens can share whatever they grow to."""
        return 0 if self._full is None else num_tokens // self._block_size

    def find(self, request: Request, max_pages: int) -> tuple[tuple[np.ndarray, ...], int]:
        """The longest cached prefix of a request, at most `max_pages` pages.

        Returns:
            Per group, [.] int32: the pages of it that the next query sees; and its length in pages.
        """
        full_ids = None if self._full is None else self._full.find(request, max_pages)
        num_pages = max_pages if full_ids is None else len(full_ids)
        if not self._local:
            assert full_ids is not None, "lookup lengths are multiples that every group can serve"
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
        if len(self._groups) == 1:
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
        for group, block_ids in zip(self._groups, cached_block_ids, strict=True):
            group.share(row, request, block_ids, num_cached // self._block_size)
        return tuple(group.extend(row, num_tokens) for group in self._groups)

    def cached_in_full(self, cached_block_ids: tuple[np.ndarray, ...]) -> np.ndarray:
        """Of a cached prefix the pages of the group that keeps whole sequences; none where there is no such group."""
        return NO_IDS if self._full is None else cached_block_ids[0]

    def num_blocks_to_restore(self, num_cached: int, num_freed: Sequence[int], num_tokens: int) -> int:
        """Free pages that `restore` takes."""
        return sum(
            group.num_blocks_behind(num_cached if group is self._full else freed, num_tokens)
            for group, freed in zip(self._groups, num_freed, strict=True)
        )

    def restore(
        self, row: int, request: Request, cached_block_ids: np.ndarray, num_freed: Sequence[int], num_tokens: int
    ) -> tuple[np.ndarray, ...]:
        """Give an empty row pages up to `num_tokens`, but for `num_freed` leading ones per group that frees pages."""
        for group, freed in zip(self._groups, num_freed, strict=True):
            if group is self._full:
                group.share(row, request, cached_block_ids, len(cached_block_ids))
            else:
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

    def free_beyond(self, row: int, num_tokens: int) -> None:
        """Give up the row's pages that hold none of its first `num_tokens` tokens."""
        for group in self._groups:
            group.free_beyond(row, num_tokens)

    def free(self, row: int) -> None:
        """Give up the row's pages."""
        for group in self._groups:
            group.free(row)
