"""KVCacheManager: the scheduler's only interface to the KV cache.

Called by the scheduler. Owns the block pool and, through the coordinator, the block tables by row. Blocks are
asked for in tokens; answers are messages for the worker. Only blocks whose keys and values were computed in an
executed step are ever visible to other requests.

Blocks of 4 tokens; request A, in row 0, has computed the prompt `1 2 3 4 5 6`; B arrives with `1 2 3 4 9`:

    cache_full_blocks([0], [6], tokens)      # the block of `1 2 3 4` can be found; that of `5 6` is not full
    prefix = get_computed_blocks(B)          # a hit: 4 tokens; the last token is always computed
    demand(prefix, 5).num_new                # 1 block: for `9`
    place(...)                               # B's row: the shared block, referenced twice now, and a new one
    free(0)                                  # A ends: `5 6` is free at once, the shared block is still B's
    free(1)                                  # now it is free, and stays findable until it is given out again
"""

from __future__ import annotations

from typing import Any

import numpy as np

from quire.core.cache_info import CacheMiss, MissReason
from quire.core.kv_spec import KVCacheConfig
from quire.core.live_state import BlockMap, PrefixMap
from quire.core.request import ExtraKeys, Request
from quire.core.scheduler_output import BlockCopies, NewBlocks, StateBlocks
from quire.kv_cache.block_copies import PendingCopies
from quire.kv_cache.block_demand import BlockDemand, PoolCounts
from quire.kv_cache.block_hash import BlockHashFn, bytes_by_block, hash_full_blocks, sha256_block_hash
from quire.kv_cache.block_pool import BlockPool
from quire.kv_cache.cached_prefix import CachedPrefix
from quire.kv_cache.checkpoints import Checkpoints
from quire.kv_cache.coordinator import KVCacheCoordinator
from quire.kv_cache.event_recorder import KVEventRecorder
from quire.kv_cache.live_state import block_maps, prefix_map
from quire.kv_cache.miss_explainer import MissExplainer
from quire.kv_cache.prefix_tree import ROOT
from quire.kv_cache.single_type.row_blocks import NO_IDS, ManagerParts
from quire.kv_cache.swap_pool import SwappedBlocks

NO_LIMIT = 2**62
"""Most tokens of a request, where its blocks do not grow with its length."""


class KVCacheManager:
    """Blocks of the admitted requests, by row, and the prefix cache.

    Attributes:
        names_blocks: full blocks have names, by which they can be kept outside and found there.
        keeps_sequence: a sequence is what its blocks hold: there is one group, which frees none.
        can_take_back: a row's last computed tokens can be taken back; not where a layer keeps a state of all of them.

    Args:
        kv_cache_config: number and size of blocks.
        enable_prefix_caching: share full blocks between requests that begin alike.
        max_num_seqs: number of rows.
        max_model_len: most tokens of a row.
        hash_fn: names a block by its content for other programs.
        max_chunk_tokens: most tokens of one request that the steps in flight compute; None = `max_model_len`.
        checkpoint_interval: tokens between the states that are kept of a prompt, beside those at its borders; 0 = none.
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
        checkpoint_interval: int = 0,
    ) -> None:
        self.block_size = kv_cache_config.block_size
        is_whole = [group.spec.keeps_sequence for group in kv_cache_config.groups]
        sizes = [pool.num_blocks for pool in kv_cache_config.pools]
        has_state = [not group.spec.can_take_back for group in kv_cache_config.groups]
        self._pool = BlockPool(kv_cache_config.num_blocks, is_whole, hash_fn, sizes, has_state)
        self._tree = self._pool.prefix_index.tree
        self._copies = PendingCopies(self._pool)
        max_chunk_tokens = min(max_chunk_tokens or max_model_len, max_model_len)
        parts = ManagerParts(
            pool=self._pool, max_num_seqs=max_num_seqs, max_model_len=max_model_len, max_chunk_tokens=max_chunk_tokens,
            pool_of_group=tuple(group.pool for group in kv_cache_config.groups),
        )  # fmt: skip
        self._coordinator = KVCacheCoordinator(kv_cache_config, parts)
        self.can_take_back = self._coordinator.can_take_back
        self._is_caching = enable_prefix_caching
        keeps_states = enable_prefix_caching and not self.can_take_back
        self._has_state = np.array(has_state, dtype=np.int32)
        self._state_bytes = {
            number: group.page_size_bytes for number, group in enumerate(kv_cache_config.groups) if has_state[number]
        }
        self._borders = Checkpoints(self.block_size, checkpoint_interval) if keeps_states else None
        self._hash_fn = hash_fn
        self.names_blocks, self.keeps_sequence = enable_prefix_caching, is_whole == [True]
        self._explainer = MissExplainer(self._pool.prefix_index, self.block_size, self._coordinator.is_computing)
        self._no_prefix = CachedPrefix((np.empty(0, dtype=np.int32),) * len(is_whole), 0)
        longest = self._coordinator.longest_sequence
        self._max_tokens = NO_LIMIT if longest is None else longest * self.block_size + 1

    @property
    def num_usable_blocks(self) -> int:
        """Blocks there are, the null block excluded."""
        return self._pool.num_usable_blocks

    @property
    def num_free_blocks(self) -> int:
        """Blocks not in use, cached ones included."""
        return self._pool.num_free_blocks

    @property
    def usable_counts(self) -> PoolCounts:
        """Blocks there are, null blocks excluded, pool for pool."""
        return self._pool.usable_counts

    def free_counts(self) -> PoolCounts:
        """Blocks not in use, cached ones included, pool for pool."""
        return self._pool.free_counts()

    @property
    def usage(self) -> float:
        """Share of blocks in use, of the pool that is used most, in [0, 1]."""
        return self._pool.usage

    def state_counts(self) -> dict[str, Any]:
        """What `SchedulerStats` says of recurrent states that are kept for later requests."""
        blocks = self._pool.prefix_index.blocks
        return {
            "num_state_checkpoints": sum(len(blocks[number]) for number in self._state_bytes),
            "state_checkpoint_bytes": sum(len(blocks[number]) * size for number, size in self._state_bytes.items()),
        }

    @property
    def max_tokens_per_request(self) -> int:
        """Longest request that runs when alone: its last token is sampled, but never written to the cache."""
        return self._max_tokens

    def num_blocks_held(self, num_tokens: np.ndarray) -> np.ndarray:
        """[num_pools, .] most blocks that requests of `num_tokens` ([.]) tokens hold at once."""
        return self._coordinator.num_blocks_held(num_tokens)

    def num_blocks_shared(self, num_tokens: int) -> PoolCounts:
        """Blocks that requests with the same first `num_tokens` tokens can share whatever they grow to."""
        return self._coordinator.num_blocks_shared(num_tokens)

    def note_arrival(self, request: Request) -> None:
        """Set what besides its tokens decides the content of a request's blocks."""
        if self._is_caching:
            request.extra_keys = self._extra_keys(request)

    def _extra_keys(self, request: Request) -> dict[int, ExtraKeys]:
        """A salt belongs to the first block that is not wholly shared; the blocks after it are tied to it."""
        message = request.message
        if message.cache_salt is None:
            return {}
        first = min(message.num_shared_tokens, request.num_prompt_tokens) // self.block_size
        return {max(0, first): (("cache_salt", message.cache_salt),)}

    def get_computed_blocks(self, request: Request) -> CachedPrefix:
        """The longest cached prefix of a request without a row; at least one token is left to compute."""
        if not (self._is_caching and request.may_read_prefix_cache):
            return self._no_prefix
        self._note_block_tokens(request)
        return self._coordinator.find(request, (len(request.token_ids) - 1) // self.block_size)

    def _note_block_tokens(self, request: Request) -> None:
        """Cut a request without a row into blocks, unless that is done; while it had a row, its tokens grew."""
        num_full = len(request.token_ids) // self.block_size
        if len(request.block_tokens) != num_full:
            block_tokens = request.token_ids[: num_full * self.block_size].reshape(num_full, self.block_size)
            request.block_tokens = bytes_by_block(block_tokens)

    def explain_miss(self, request: Request, prefix: CachedPrefix) -> CacheMiss | None:
        """Why no more of a request is cached, before it is placed; None when all that can be used is."""
        if prefix.num_tokens and prefix.num_tokens >= len(request.token_ids) - 1:
            return None
        if not self._is_caching:
            return CacheMiss(MissReason.CACHING_OFF, 0)
        if not request.may_read_prefix_cache:
            needs_all = request.message.sampling_params.prompt_logprobs is not None
            return CacheMiss(MissReason.PROMPT_LOGPROBS if needs_all else MissReason.READING_SKIPPED, 0)
        if prefix.num_tokens + self.block_size <= request.num_computed_tokens:  # full blocks of it are gone
            return CacheMiss(MissReason.PREEMPTED, prefix.num_tokens)
        return self._explainer.explain(request, prefix)

    def demand(self, prefix: CachedPrefix, num_tokens: int, swapped: SwappedBlocks | None = None) -> BlockDemand:
        """What a request asks for when it is placed with room for `num_tokens` tokens.

        Of more tokens than a step computes, no more blocks are counted than are held at once.
        """
        return self._coordinator.demand(prefix, num_tokens, None if swapped is None else swapped.num_freed)

    def place(
        self, row: int, request: Request, prefix: CachedPrefix, num_tokens: int, swapped: SwappedBlocks | None = None
    ) -> tuple[np.ndarray, ...]:
        """Give a request's row its cached prefix and blocks up to `num_tokens`; they must be free.

        Args:
            swapped: what of it is in host memory, whose contents will be copied to the row's blocks.

        Returns:
            Per group: [num_blocks] int32, all blocks of the row; the null block for those no query will see.
        """
        if swapped is not None:
            return self._coordinator.place(row, request, prefix, num_tokens, swapped.num_freed)
        if self._is_caching and request.message.sampling_params.no_store:
            self._note_not_stored(request, prefix)
        block_ids = self._coordinator.place(row, request, prefix, num_tokens)
        if prefix.partial_block_ids:
            targets = [ids[prefix.num_tokens // self.block_size] for ids in block_ids]
            self._copies.add(row, np.array(prefix.partial_block_ids, np.int32), np.array(targets, np.int32))
        return block_ids

    def shared_on_restore(self, prefix: CachedPrefix) -> np.ndarray:
        """[.] int32: blocks of a cached prefix that a restored row shares: of groups that keep whole sequences."""
        shared = self._coordinator.shared_on_restore(prefix.block_ids)
        return shared[0] if len(shared) == 1 else np.concatenate(shared)

    def shared_prefix(self, row: int, num_tokens: int) -> CachedPrefix | None:
        """The first `num_tokens` tokens of a placed row, for another request to begin with; they are computed.

        None when the row has freed blocks that a query after them sees.
        """
        return self._coordinator.computed_prefix(row, num_tokens)

    def name_blocks(self, request: Request, token_ids: np.ndarray) -> list[bytes]:
        """The names of a request's full blocks, which depend on content alone: by these they are kept outside.

        Args:
            token_ids: [num_tokens] int32; its first tokens.
        """
        request.block_hashes = hash_full_blocks(
            token_ids, self.block_size, request.extra_keys, self._hash_fn, request.block_hashes
        )
        return request.block_hashes

    def reserve(self, prefix: CachedPrefix, num_tokens: int) -> CachedPrefix:
        """Become a user of a cached prefix and of free blocks behind it, to be filled from outside; ends with `unpin`.

        Args:
            num_tokens: that all these blocks hold; as many blocks must be free.
        """
        self._tree.hold(prefix.node or ROOT)
        return self._coordinator.reserve(prefix, num_tokens // self.block_size)

    def load_demand(self, prefix: CachedPrefix, num_tokens: int) -> BlockDemand:
        """What `reserve` takes."""
        return self._coordinator.load_demand(prefix, num_tokens // self.block_size)

    def blocks_to_store(self, row: int, num_tokens: int) -> np.ndarray:
        """[num_groups, .] int32: blocks of a row's first `num_tokens` tokens to be kept outside, by number; 0 = none.

        Of groups that free blocks those that are still cached, of recurrent states the checkpoints.
        """
        return self._coordinator.blocks_to_store(row, num_tokens // self.block_size)

    def pin(self, prefix: CachedPrefix) -> None:
        """Become a user of blocks in use, so that they stay when their requests leave."""
        self._pool.share(prefix.all_block_ids())
        self._tree.hold(prefix.node or ROOT)

    def unpin(self, prefix: CachedPrefix) -> None:
        """The end of `keep`."""
        self._pool.free(prefix.all_block_ids())
        self._tree.release(prefix.node or ROOT)

    def take_block_copies(self) -> BlockCopies:
        """The copies that the worker has to make before it computes; each is given out once."""
        return self._copies.take()

    def _note_not_stored(self, request: Request, prefix: CachedPrefix) -> None:
        """Remember the first block that will be computed and not kept, to explain why it is missing."""
        block = prefix.num_tokens // self.block_size
        if prefix.node is None or prefix.num_unpublished or block >= len(request.block_tokens):
            return
        self._tree.hold(prefix.node)
        node = self._tree.advance(prefix.node, request.block_tokens[block], request.extra_keys.get(block, ()))
        self._pool.prefix_index.past.note(node, MissReason.NO_STORE)
        self._tree.release(node)

    def num_missing_blocks(self, rows: np.ndarray, num_tokens: np.ndarray) -> np.ndarray:
        """[num_groups, num_rows] blocks that placed rows lack to hold `num_tokens` ([num_rows]) tokens.

        Of more tokens than a step computes, no more blocks are counted than are held at once.
        """
        return self._coordinator.num_missing_blocks(rows, num_tokens)

    def by_pool(self, num_missing: np.ndarray) -> PoolCounts:
        """Blocks of each group and row, [num_groups, num_rows], added up pool for pool."""
        return self._coordinator.by_pool(num_missing.sum(axis=1).tolist())

    def is_short(self, num_missing: np.ndarray) -> bool:
        """Whether fewer blocks are free than these, [num_groups, num_rows]."""
        if len(self._pool.usable_counts) == 1:
            return bool(num_missing.sum() > self._pool.num_free_blocks)
        return any(needed > free for needed, free in zip(self.by_pool(num_missing), self.free_counts(), strict=True))

    def allocate(self, rows: np.ndarray, num_missing: np.ndarray) -> tuple[NewBlocks, ...]:
        """Give each of these placed rows `num_missing` ([num_groups, num_rows]) blocks more; they must be free."""
        return self._coordinator.append(rows, num_missing)

    def next_checkpoint(self, request: Request, start: int, num_tokens: int) -> int:
        """Where a step that computes a request from `start` on should end at the latest, of its `num_tokens` tokens."""
        return num_tokens if self._borders is None else self._borders.next_border(request, start, num_tokens)

    def settle_states(self, rows: np.ndarray, num_tokens: np.ndarray) -> None:
        """Running rows compute up to `num_tokens` ([num_rows]) tokens; states that are kept are not overwritten."""
        self._coordinator.settle_states(rows, num_tokens)

    def plan_states(
        self, rows: np.ndarray, starts: np.ndarray, ends: np.ndarray, num_tokens: np.ndarray
    ) -> tuple[StateBlocks, ...]:
        """Where a step finds and leaves recurrent states, for each group that has them.

        Args:
            rows: [num_reqs] the step's.
            starts, ends, num_tokens: [num_reqs] tokens before the step, after it, and all that a row has.
        """
        return self._coordinator.plan_states(rows, starts, ends, num_tokens, self._borders)

    def num_draft_tokens(self, most: int) -> int:
        """At most `most` drafts, as many as there are free blocks for states before them."""
        return self._coordinator.num_draft_tokens(most)

    def has_room_for_drafts(self, num_missing: np.ndarray, num_drafts: np.ndarray) -> bool:
        """Whether so many blocks are free ([num_groups, num_rows]), and those for states before drafts ([num_rows])."""
        return not self.is_short(num_missing + self._has_state[:, None] * num_drafts)

    def add_draft_states(self, rows: np.ndarray, num_drafts: np.ndarray) -> tuple[np.ndarray, ...]:
        """Blocks for the states before each draft of these rows, [sum of drafts] int32 per group that has states."""
        return () if self.can_take_back else self._coordinator.add_draft_states(rows, num_drafts)

    def end_drafts(self, row: int, num_tokens: int) -> None:
        """A step with drafts is done: of the tokens that it has computed the row's first `num_tokens` stand."""
        self._coordinator.end_drafts(row, num_tokens, self._borders is not None)

    def may_swap(self, row: int, num_tokens: int) -> bool:
        """Whether the row's blocks are those of its first `num_tokens` tokens; not of a state that is ahead of them."""
        return self.can_take_back or self._coordinator.has_states_of(row, num_tokens)

    def get_block_ids(self, row: int) -> tuple[np.ndarray, ...]:
        """Per group: blocks of a row, in order, the null block where one was freed; not to be written."""
        return self._coordinator.block_ids(row)

    def num_kept_tokens(self, request: Request, is_room_ample: bool) -> int:
        """Tokens of a placed request that it will find cached when it comes back, as far as is known.

        Args:
            is_room_ample: nothing cached will be evicted meanwhile; else only what others use, too, stays.
        """
        prefix = self.get_computed_blocks(request)
        if is_room_ample:
            return prefix.num_tokens
        if not self.can_take_back:
            return 0
        own = np.concatenate(self.get_block_ids(request.row))
        shared = [ids for ids in self._coordinator.shared_on_restore(prefix.block_ids) if ids is not NO_IDS]
        return min((self._pool.num_leading_shared(ids, own) for ids in shared), default=0) * self.block_size

    def live_state(self, rows: np.ndarray) -> tuple[list[BlockMap], PrefixMap, np.ndarray]:
        """Who has which blocks, what can be found, and how many blocks each row holds: summaries for people.

        Args:
            rows: [num_rows] the placed rows, those placed first first.
        """
        blocks = [np.concatenate(self.get_block_ids(row)) for row in rows.tolist()]
        maps, num_held = block_maps(self._pool, rows, blocks)
        return maps, prefix_map(self._pool.prefix_index), num_held

    def cache_full_blocks(self, rows: np.ndarray, num_computed_tokens: np.ndarray, token_ids: np.ndarray) -> None:
        """Publish the blocks of these rows that an executed step filled, and free those that no later query sees.

        Args:
            rows: [num_rows] distinct rows.
            num_computed_tokens: [num_rows] tokens whose keys and values are in the cache.
            token_ids: [max_num_seqs, max_model_len] int32; tokens by row.
        """
        if self._is_caching:
            self._coordinator.publish(rows, num_computed_tokens, token_ids)
        self._coordinator.free_out_of_window(rows, num_computed_tokens)

    def free_beyond(self, rows: np.ndarray, num_tokens: np.ndarray) -> None:
        """Give up the rows' blocks that hold none of their first `num_tokens` tokens; none of them was published."""
        self._coordinator.free_beyond(rows, num_tokens)

    def free(self, row: int) -> None:
        """Give up the row's blocks; cached ones stay findable until they are taken."""
        self._copies.drop(row)
        self._coordinator.free(row)

    def watch_blocks(self, recorder: KVEventRecorder) -> None:
        """Have `recorder` notified of which blocks of the first group can be found, from now on."""
        self._pool.prefix_index.subscribe(recorder)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached blocks; False, and nothing done, while any block is in use."""
        return self._pool.reset_prefix_cache()
