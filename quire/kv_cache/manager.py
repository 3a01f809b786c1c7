"""KVCacheManager: all that the scheduler knows of the KV cache.

Called by the scheduler. Owns the page pool and, through the coordinator, the block tables by row. Pages are
asked for in tokens; answers are messages for the worker. Only pages whose keys and values were computed in an
executed step are ever visible to other requests.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from quire.core.cache_info import CacheMiss, MissReason
from quire.core.kv_spec import KVCacheConfig
from quire.core.request import ExtraKeys, Request
from quire.core.scheduler_output import NewBlocks, PageCopies
from quire.kv_cache.block_hash import BlockHashFn, hash_full_pages, sha256_block_hash
from quire.kv_cache.block_pool import BlockPool
from quire.kv_cache.coordinator import KVCacheCoordinator
from quire.kv_cache.event_recorder import KVEventRecorder
from quire.kv_cache.miss_explainer import MissExplainer
from quire.kv_cache.page_copies import PendingCopies
from quire.kv_cache.page_demand import PageDemand
from quire.kv_cache.single_type.row_blocks import ManagerParts
from quire.kv_cache.swap_pool import SwappedPages

NO_LIMIT = 2**62
"""Most tokens of a request, where its pages do not grow with its length."""


@dataclass(frozen=True, slots=True)
class CachedPrefix:
    """The beginning of a request that is in the cache, and how many tokens it has.

    Attributes:
        block_ids: per group: those of its full pages that the next query sees.
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
        max_chunk_tokens: most tokens of one request that a step computes; None = `max_model_len`.
    """

    def __init__(
        self,
        kv_cache_config: KVCacheConfig,
        *,
        enable_prefix_caching: bool,
        max_num_seqs: int,
        max_model_len: int,
        hash_fn: BlockHashFn = sha256_block_hash,
        max_chunk_tokens: int | None = None,
    ) -> None:
        self.block_size = kv_cache_config.block_size
        self._hash_fn = hash_fn
        self._pool = BlockPool(kv_cache_config.num_blocks, self.block_size)
        self._copies = PendingCopies(self._pool)
        max_chunk_tokens = min(max_chunk_tokens or max_model_len, max_model_len)
        parts = ManagerParts(
            pool=self._pool, max_num_seqs=max_num_seqs, max_model_len=max_model_len, max_chunk_tokens=max_chunk_tokens,
            hash_fn=hash_fn,
        )  # fmt: skip
        self._coordinator = KVCacheCoordinator(kv_cache_config, parts)
        self._is_caching = enable_prefix_caching and self._coordinator.finds_prefixes
        self._explainer = MissExplainer(
            self._pool.prefix_index, self.block_size, hash_fn, self._coordinator.is_computing
        )
        self._no_prefix = CachedPrefix((np.empty(0, dtype=np.int32),) * len(kv_cache_config.groups), 0)
        longest = self._coordinator.longest_sequence
        self._max_tokens = NO_LIMIT if longest is None else longest * self.block_size + 1

    @property
    def num_usable_blocks(self) -> int:
        """Pages there are, the null page excluded."""
        return self._pool.num_usable_blocks

    @property
    def num_free_blocks(self) -> int:
        """Pages that nobody uses, cached ones included."""
        return self._pool.num_free_blocks

    @property
    def can_take_back(self) -> bool:
        """Whether a row's last computed tokens can be taken back; not where a layer keeps a state of all of them."""
        return self._coordinator.finds_prefixes

    @property
    def usage(self) -> float:
        """Share of pages in use, in [0, 1]."""
        return self._pool.usage

    @property
    def max_tokens_per_request(self) -> int:
        """Longest request that runs when alone: its last token is sampled, but never written to the cache."""
        return self._max_tokens

    def num_blocks_held(self, num_tokens: np.ndarray) -> np.ndarray:
        """[.] most pages that requests of `num_tokens` ([.]) tokens hold at once."""
        return self._coordinator.num_blocks_held(num_tokens)

    def num_blocks_shared(self, num_tokens: int) -> int:
        """Pages that requests with the same first `num_tokens` tokens can share whatever they grow to."""
        return self._coordinator.num_blocks_shared(num_tokens)

    def hash_prompt(self, request: Request) -> None:
        """Name the full pages of a request that has just arrived."""
        if self._is_caching:
            request.extra_keys = self._extra_keys(request)
            if self._coordinator.uses_hashes:
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
            return self._no_prefix
        max_pages = (len(request.token_ids) - 1) // self.block_size
        block_ids, num_pages = self._coordinator.find(request, max_pages)
        return CachedPrefix(block_ids, num_pages * self.block_size)

    def explain_miss(self, request: Request, prefix: CachedPrefix) -> CacheMiss | None:
        """Why no more of a request is cached, before it is placed; None when all that can be used is."""
        if prefix.num_tokens and prefix.num_tokens >= len(request.token_ids) - 1:
            return None
        if not self._is_caching:
            return CacheMiss(MissReason.CACHING_OFF, 0)
        if not request.may_read_prefix_cache:
            needs_all = request.message.sampling_params.prompt_logprobs is not None
            return CacheMiss(MissReason.PROMPT_LOGPROBS if needs_all else MissReason.READING_SKIPPED, 0)
        if prefix.num_tokens + self.block_size <= request.num_computed_tokens:  # full pages of it are gone
            return CacheMiss(MissReason.PREEMPTED, prefix.num_tokens)
        if not self._coordinator.uses_hashes:
            return self._explain_windows(request, prefix.num_tokens)
        return self._explainer.explain(request, prefix.block_ids[0])

    def _explain_windows(self, request: Request, num_cached: int) -> CacheMiss | None:
        """As `explain_miss`, where all groups free pages and none has names to look up."""
        num_usable = (len(request.token_ids) - 1) // self.block_size
        if num_cached == num_usable * self.block_size:
            return None if num_usable else CacheMiss(MissReason.BELOW_ONE_PAGE, 0)
        is_known = self._coordinator.num_known_pages(request, num_usable) * self.block_size > num_cached
        return CacheMiss(MissReason.EVICTED if is_known else MissReason.COLD, num_cached)

    def demand(self, prefix: CachedPrefix, num_tokens: int, swapped: SwappedPages | None = None) -> PageDemand:
        """What a request asks for when it is placed with room for `num_tokens` tokens.

        Of more tokens than a step computes, no more pages are counted than are held at once, unless it is swapped.
        """
        if swapped is None:
            num_taken = self._coordinator.num_new_blocks(prefix.num_tokens, num_tokens)
            shared = prefix.block_ids
        else:
            shared = (self.shared_on_restore(prefix),)
            num_taken = self._coordinator.num_blocks_to_restore(len(shared[0]), swapped.num_freed, num_tokens)
        return PageDemand(num_taken + sum(self._pool.num_free_among(block_ids) for block_ids in shared))

    def place(
        self, row: int, request: Request, prefix: CachedPrefix, num_tokens: int, swapped: SwappedPages | None = None
    ) -> tuple[np.ndarray, ...]:
        """Give a request's row its cached prefix and pages up to `num_tokens`; they must be free.

        Args:
            swapped: what of it is in host memory, whose contents will be copied to the row's pages.

        Returns:
            Per group: [num_blocks] int32, all pages of the row; the null page for those no query will see.
        """
        if swapped is not None:
            shared = self.shared_on_restore(prefix)
            return self._coordinator.restore(row, request, shared, swapped.num_freed, num_tokens)
        if self._is_caching and request.message.sampling_params.no_store:
            self._note_not_stored(request, len(prefix.block_ids[0]))
        block_ids = self._coordinator.place(row, request, prefix.block_ids, prefix.num_tokens, num_tokens)
        if prefix.partial_block_ids:
            targets = [ids[prefix.num_tokens // self.block_size] for ids in block_ids]
            self._copies.add(row, np.array(prefix.partial_block_ids, np.int32), np.array(targets, np.int32))
        return block_ids

    def shared_on_restore(self, prefix: CachedPrefix) -> np.ndarray:
        """[.] int32: pages of a cached prefix that a restored row shares: those of the group with whole sequences."""
        return self._coordinator.cached_in_full(prefix.block_ids)

    def shared_prefix(self, row: int, num_tokens: int) -> CachedPrefix | None:
        """The first `num_tokens` tokens of a placed row, for another request to begin with; they are computed.

        None when the row has freed pages that a query after them sees.
        """
        per_group = self._coordinator.computed_pages(row, num_tokens)
        if per_group is None:
            return None
        if num_tokens % self.block_size == 0:
            return CachedPrefix(per_group, num_tokens)
        return CachedPrefix(tuple(ids[:-1] for ids in per_group), num_tokens, tuple(int(ids[-1]) for ids in per_group))

    @property
    def names_all_pages(self) -> bool:
        """Whether every full page of a request has a name, by which it can be kept outside and found there."""
        return self._is_caching and self._coordinator.uses_hashes and len(self._no_prefix.block_ids) == 1

    def reserve(self, prefix: CachedPrefix, num_tokens: int) -> CachedPrefix:
        """Become a user of a cached prefix and of free pages behind it, to be filled from outside; ends with `let_go`.

        Args:
            num_tokens: that all these pages hold; as many pages must be free.
        """
        cached = prefix.block_ids[0]
        self._pool.share(cached)
        fresh = self._pool.take(num_tokens // self.block_size - len(cached))
        return CachedPrefix((np.concatenate([cached, fresh]),), num_tokens)

    def keep(self, prefix: CachedPrefix) -> None:
        """Become a user of pages in use, so that they stay when their requests leave."""
        self._pool.share(prefix.all_block_ids())

    def let_go(self, prefix: CachedPrefix) -> None:
        """The end of `keep`."""
        self._pool.free(prefix.all_block_ids())

    def take_page_copies(self) -> PageCopies:
        """The copies that the worker has to make before it computes; each is given out once."""
        return self._copies.take()

    def _note_not_stored(self, request: Request, page: int) -> None:
        """The first page that will be computed and not kept: whoever looks for it can be told why it is missing."""
        if page < len(request.block_hashes):
            self._pool.prefix_index.past.note(request.block_hashes[page], MissReason.NO_STORE)

    def num_missing_blocks(self, rows: np.ndarray, num_tokens: np.ndarray) -> np.ndarray:
        """[num_groups, num_rows] pages that placed rows lack to hold `num_tokens` ([num_rows]) tokens.

        Of more tokens than a step computes, no more pages are counted than are held at once.
        """
        return self._coordinator.num_missing_blocks(rows, num_tokens)

    def allocate(self, rows: np.ndarray, num_missing: np.ndarray) -> tuple[NewBlocks, ...]:
        """Give each of these placed rows `num_missing` ([num_groups, num_rows]) pages more; they must be free."""
        return self._coordinator.append(rows, num_missing)

    def get_block_ids(self, row: int) -> tuple[np.ndarray, ...]:
        """Per group: pages of a row, in order, the null page where one was freed; not to be written."""
        return self._coordinator.block_ids(row)

    def num_kept_tokens(self, request: Request, is_room_ample: bool) -> int:
        """Tokens of a placed request that it will find cached when it comes back, as far as can be told.

        Args:
            is_room_ample: nothing cached will be evicted meanwhile; else only what others use, too, stays.
        """
        prefix = self.get_computed_blocks(request)
        if is_room_ample:
            return prefix.num_tokens
        block_ids = self.shared_on_restore(prefix)
        own = np.concatenate(self.get_block_ids(request.row))
        return self._pool.num_leading_shared(block_ids, own) * self.block_size

    def cache_full_blocks(self, rows: np.ndarray, num_computed_tokens: np.ndarray, token_ids: np.ndarray) -> None:
        """Publish the pages of these rows that an executed step filled, and free those that no later query sees.

        Args:
            rows: [num_rows] distinct rows.
            num_computed_tokens: [num_rows] tokens whose keys and values are in the cache.
            token_ids: [max_num_seqs, max_model_len] int32; tokens by row.
        """
        if self._is_caching:
            self._coordinator.publish(rows, num_computed_tokens, token_ids)
        self._coordinator.free_passed(rows, num_computed_tokens)

    def free_beyond(self, row: int, num_tokens: int) -> None:
        """Give up the row's pages that hold none of its first `num_tokens` tokens; none of them was published."""
        self._coordinator.free_beyond(row, num_tokens)

    def free(self, row: int) -> None:
        """Give up the row's pages; cached ones stay findable until they are taken."""
        self._copies.drop(row)
        self._coordinator.free(row)

    def watch_pages(self, recorder: KVEventRecorder) -> None:
        """Tell `recorder` which pages of the group that keeps whole sequences can be found, from now on."""
        self._pool.prefix_index.watch(recorder)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached pages; False, and nothing done, while any page is in use."""
        return self._pool.reset_prefix_cache()
