"""The one place that knows how many KV cache groups there are: it turns calls into one call per group.

Called by `KVCacheManager`. Owns the single-type managers, which share the blocks, and how far each row's tokens are in
the prefix tree. Asks no group of which kind it is, but for those with a recurrent state, whose blocks a step reads and
writes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np

from quire.core.kv_spec import KVCacheConfig, KVCacheSpec
from quire.core.request import ExtraKeys, Request
from quire.core.scheduler_output import NewBlocks, StateBlocks
from quire.errors import UnsupportedError
from quire.kv_cache.block_counts import longest_sequence, num_blocks_held
from quire.kv_cache.block_demand import BlockDemand, PoolCounts
from quire.kv_cache.cached_prefix import CachedPrefix
from quire.kv_cache.checkpoints import Checkpoints
from quire.kv_cache.prefix_tree import ROOT
from quire.kv_cache.row_prefixes import RowPrefixes
from quire.kv_cache.single_type.managers import make_manager
from quire.kv_cache.single_type.row_blocks import NO_IDS, ManagerParts, RowBlocks
from quire.kv_cache.single_type.state import StateManager


class KVCacheCoordinator:
    """Blocks of all groups: first those that keep whole sequences, then those that free blocks.

    Attributes:
        can_take_back: rows can be taken back to fewer tokens.
    """

    def __init__(self, kv_cache_config: KVCacheConfig, parts: ManagerParts) -> None:
        specs = [group.spec for group in kv_cache_config.groups]
        keeps_sequences = [spec.keeps_sequence for spec in specs]
        if not specs or keeps_sequences != sorted(keeps_sequences, reverse=True):
            raise UnsupportedError(
                f"{len(specs)} KV cache groups: those that keep whole sequences must come first",
                hint="make the plan with kv_cache.planning.plan_kv_cache",
            )
        self._block_size = kv_cache_config.block_size
        self._pool = parts.pool
        self._pool_of_group = parts.pool_of_group
        self._most_of_pool: list[list[int | None]] = [[] for _ in parts.pool.usable_counts]
        for spec, pool in zip(specs, parts.pool_of_group, strict=True):
            self._most_of_pool[pool].append(spec.most_blocks(parts.max_chunk_tokens))
        self._keeps_sequences = keeps_sequences
        self._first_blocks_needed = partial(_first_blocks_needed, specs)  # a function, as specs are no state
        self.can_take_back = all(spec.can_take_back for spec in specs)
        self._groups = [make_manager(spec, parts, number) for number, spec in enumerate(specs)]
        self._states = [group for group in self._groups if isinstance(group, StateManager)]
        self._stateless = [group for group in self._groups if not isinstance(group, StateManager)]
        self._rows = RowPrefixes(parts.pool.prefix_index.tree, parts.max_num_seqs, self._block_size)

    @property
    def longest_sequence(self) -> int | None:
        """Blocks of tokens of the longest request that runs when alone; None = there is no longest one."""
        longest = map(longest_sequence, self._pool.usable_counts, self._most_of_pool)
        return min((one for one in longest if one is not None), default=None)

    def num_blocks_held(self, num_tokens: np.ndarray) -> np.ndarray:
        """[num_pools, .] most blocks that requests of `num_tokens` ([.]) tokens hold at once."""
        num_blocks = -(-num_tokens // self._block_size)
        if len(self._most_of_pool) == 1:
            return np.asarray(num_blocks_held(num_blocks, self._most_of_pool[0]))[None]
        return np.stack([np.asarray(num_blocks_held(num_blocks, most)) for most in self._most_of_pool])

    def num_blocks_shared(self, num_tokens: int) -> PoolCounts:
        """Full blocks that requests with the same first `num_tokens` tokens can share whatever they grow to."""
        num_blocks = num_tokens // self._block_size
        return self.by_pool([num_blocks * keeps for keeps in self._keeps_sequences])

    def by_pool(self, per_group: Sequence[int]) -> PoolCounts:
        """Numbers of blocks of each group, added up pool for pool."""
        if len(self._most_of_pool) == 1:
            return (sum(per_group),)
        counts = [0] * len(self._most_of_pool)
        for pool, count in zip(self._pool_of_group, per_group, strict=True):
            counts[pool] += count
        return tuple(counts)

    def find(self, request: Request, max_blocks: int) -> CachedPrefix:
        """The longest cached prefix of a request, at most `max_blocks` blocks, that every group can serve."""
        nodes = self._pool.prefix_index.tree.walk(request.block_tokens, request.extra_keys, max_blocks)
        found = common = _agreed(self._stateless, nodes, len(nodes))
        if self._states:
            found = _agreed(self._groups, nodes, common)
        block_ids = tuple(group.cached_block_ids(nodes, found) for group in self._groups)
        return CachedPrefix(
            block_ids, found * self._block_size, node=nodes[found - 1] if found else ROOT,
            num_common_tokens=common * self._block_size if self._states else 0,
        )  # fmt: skip

    def demand(self, prefix: CachedPrefix, num_tokens: int, num_freed: Sequence[int] | None) -> BlockDemand:
        """By how many blocks `place` shrinks the free list.

        Of more tokens than a step computes, no more blocks are counted than are held at once.
        """
        num_new = [
            group.num_new_blocks(len(shared), num_blocks, num_tokens) + self._pool.num_free_among(shared)
            for group, shared, num_blocks in self._starts(prefix, num_freed)
        ]
        return BlockDemand(self.by_pool(num_new))

    def _starts(
        self, prefix: CachedPrefix, num_freed: Sequence[int] | None
    ) -> Iterator[tuple[RowBlocks, np.ndarray, int]]:
        """Per group: blocks that a row shares, and the number of blocks up to their end (`RowBlocks.share`)."""
        if num_freed is None:
            num_blocks = prefix.num_tokens // self._block_size
            for group, block_ids in zip(self._groups, prefix.block_ids, strict=True):
                yield group, block_ids, num_blocks
            return
        shared = self.shared_on_restore(prefix.block_ids)
        for group, block_ids, freed in zip(self._groups, shared, num_freed, strict=True):
            yield group, block_ids, max(len(block_ids), freed)

    def computed_prefix(self, row: int, num_tokens: int) -> CachedPrefix | None:
        """A row's first `num_tokens` tokens, which are computed; None when a block the next query sees is freed."""
        blocks = [group.computed_blocks(row, num_tokens) for group in self._groups]
        found = tuple(block_ids for block_ids in blocks if block_ids is not None)
        if len(found) < len(blocks):
            return None
        num_full, rest = divmod(num_tokens, self._block_size)
        node, num_published = self._rows.reached(row, num_full)
        partial = tuple(int(ids[-1]) for ids in found) if rest else ()
        full = tuple(ids[:-1] for ids in found) if rest else found
        return CachedPrefix(full, num_tokens, partial, node, num_full - num_published)

    def num_missing_blocks(self, rows: np.ndarray, num_tokens: np.ndarray) -> np.ndarray:
        """[num_groups, num_rows] blocks that rows lack to hold `num_tokens` tokens."""
        if len(self._groups) == 1:
            return self._groups[0].num_missing_blocks(rows, num_tokens)[None]
        return np.stack([group.num_missing_blocks(rows, num_tokens) for group in self._groups])

    def append(self, rows: np.ndarray, num_missing: np.ndarray) -> tuple[NewBlocks, ...]:
        """Give each row `num_missing` ([num_groups, num_rows]) blocks more; they must be free."""
        return tuple(group.append(rows, missing) for group, missing in zip(self._groups, num_missing, strict=True))

    def place(
        self, row: int, request: Request, prefix: CachedPrefix, num_tokens: int, num_freed: Sequence[int] | None = None
    ) -> tuple[np.ndarray, ...]:
        """Give an empty row a cached prefix, then free blocks up to `num_tokens`.

        Args:
            num_freed: of a row that is restored, per group: how many first blocks are freed; None = it is not restored.

        Returns:
            Per group: [num_blocks] int32, all its blocks.
        """
        # What is cached in one group must not be taken for another.
        for group, shared, num_blocks in self._starts(prefix, num_freed):
            group.share(row, shared, num_blocks)
        num_published = prefix.num_tokens // self._block_size - prefix.num_unpublished
        self._rows.start(row, request, prefix.node, num_published)
        if prefix.is_loaded:
            for group in self._states:
                group.note_loaded(row, prefix.num_tokens // self._block_size)
        return tuple(group.extend(row, num_tokens) for group in self._groups)

    def reserve(self, prefix: CachedPrefix, num_blocks: int) -> CachedPrefix:
        """Become a user of what a longer prefix needs: of cached blocks, and of free ones behind them to be filled."""
        plan = self._load_plan(prefix, num_blocks)
        for shared, _ in plan:  # before any is taken
            self._pool.share(shared)
        block_ids = tuple(
            np.concatenate([shared, self._pool.take(num_fresh, pool)])
            for (shared, num_fresh), pool in zip(plan, self._pool_of_group, strict=True)
        )
        num_unpublished = prefix.num_unpublished + num_blocks - prefix.num_tokens // self._block_size
        return dataclasses.replace(
            prefix, block_ids=block_ids, num_tokens=num_blocks * self._block_size, num_unpublished=num_unpublished,
            is_loaded=True,
        )  # fmt: skip

    def load_demand(self, prefix: CachedPrefix, num_blocks: int) -> BlockDemand:
        """By how many blocks `reserve` shrinks the free lists."""
        plan = self._load_plan(prefix, num_blocks)
        return BlockDemand(self.by_pool([num_fresh + self._pool.num_free_among(shared) for shared, num_fresh in plan]))

    def _load_plan(self, prefix: CachedPrefix, num_blocks: int) -> list[tuple[np.ndarray, int]]:
        """Per group: which blocks of a cached prefix one of `num_blocks` blocks shares, and how many it adds."""
        num_cached, plan = prefix.num_tokens // self._block_size, []
        for first, cached in zip(self._first_blocks_needed(num_blocks), prefix.block_ids, strict=True):
            shared = cached[max(0, first - (num_cached - len(cached))) :]
            plan.append((shared, num_blocks - max(num_cached, first)))
        return plan

    def blocks_to_store(self, row: int, num_blocks: int) -> np.ndarray:
        """[num_groups, .] int32: blocks with the ends of the prefixes of a row's first blocks; 0 = there is none.

        Up to `num_blocks` blocks, as far as they are published.
        """
        nodes = self._rows.nodes_of(row, num_blocks)
        return np.stack([group.blocks_to_store(row, nodes) for group in self._groups])

    def shared_on_restore(self, cached_block_ids: tuple[np.ndarray, ...]) -> tuple[np.ndarray, ...]:
        """Per group: blocks of a cached prefix that a restored row shares: of groups that keep whole sequences."""
        return tuple(
            block_ids if keeps_sequence else NO_IDS
            for keeps_sequence, block_ids in zip(self._keeps_sequences, cached_block_ids, strict=True)
        )

    def block_ids(self, row: int) -> tuple[np.ndarray, ...]:
        """Blocks of a row, in order; the null block where one was freed."""
        return tuple(group.block_ids(row) for group in self._groups)

    def publish(self, rows: np.ndarray, num_computed_tokens: np.ndarray, token_ids: np.ndarray) -> None:
        """Make blocks that are full and computed findable."""
        filled = self._rows.advance(rows, num_computed_tokens, token_ids)
        if filled is not None:
            for group in self._groups:
                group.publish(filled)

    def free_out_of_window(self, rows: np.ndarray, num_computed_tokens: np.ndarray) -> None:
        """Free the blocks of these rows that no later query sees."""
        for group in self._groups:
            group.free_out_of_window(rows, num_computed_tokens)

    def settle_states(self, rows: np.ndarray, num_tokens: np.ndarray) -> None:
        """Running rows compute up to `num_tokens` ([num_rows]) tokens; states that are kept are not overwritten."""
        for group in self._states:
            group.settle(rows, num_tokens)

    def plan_states(
        self,
        rows: np.ndarray,
        starts: np.ndarray,
        ends: np.ndarray,
        num_tokens: np.ndarray,
        borders: Checkpoints | None,
    ) -> tuple[StateBlocks, ...]:
        """Where a step finds and leaves states, for each group that has them; what it leaves at a border is kept.

        Args:
            rows: [num_reqs] the step's.
            starts, ends, num_tokens: [num_reqs] tokens before the step, after it, and all that a row has.
            borders: None = nothing is kept.
        """
        blocks = tuple(group.plan(rows, starts, ends) for group in self._states)
        kept = [] if borders is None else self._at_borders(rows, ends, num_tokens, borders)
        if kept:
            for group in self._states:
                group.keep(rows[kept], ends[kept], ends[kept] == num_tokens[kept])
        return blocks

    def _at_borders(
        self, rows: np.ndarray, ends: np.ndarray, num_tokens: np.ndarray, borders: Checkpoints
    ) -> list[int]:
        """Which of these rows leave a state that is to be kept."""
        kept = []
        for i in np.flatnonzero((ends % self._block_size == 0) & (ends <= num_tokens)).tolist():  # drafts may be wrong
            row, end, num = int(rows[i]), int(ends[i]), int(num_tokens[i])
            is_due = end == num or borders.is_border(self._rows.request_on(row), end, num)
            if is_due and self._rows.publishes(row):
                kept.append(i)
        return kept

    def num_draft_tokens(self, most: int) -> int:
        """At most `most` drafts for whose states there are free blocks."""
        return min([most, *(group.num_free for group in self._states)])

    def add_draft_states(self, rows: np.ndarray, num_drafts: np.ndarray) -> tuple[np.ndarray, ...]:
        """Blocks for the states before each draft of these rows, for each group that has states."""
        counts = list(zip(rows.tolist(), num_drafts.tolist(), strict=True))
        return tuple(np.concatenate([group.add_drafts(*one) for one in counts]) for group in self._states)

    def end_drafts(self, row: int, num_tokens: int, is_caching: bool) -> None:
        """A step with drafts is done: of the tokens that it has computed the row's first `num_tokens` stand."""
        for group in self._states:
            group.end_drafts(row, num_tokens, is_caching and self._rows.publishes(row))

    def has_states_of(self, row: int, num_tokens: int) -> bool:
        """Whether the newest states of a row are those after so many tokens."""
        return all(group.is_at(row, num_tokens) for group in self._states)

    def is_computing(self, node: int, block: int, tokens: bytes, extra_keys: ExtraKeys) -> bool:
        """Whether a row is about to fill and publish block number `block`, of this content, after a prefix."""
        return self._rows.is_computing(node, block, tokens, extra_keys)

    def free_beyond(self, rows: np.ndarray, num_tokens: np.ndarray) -> None:
        """Give up the rows' blocks that hold none of their first `num_tokens` tokens."""
        for group in self._groups:
            group.free_beyond(rows, num_tokens)

    def free(self, row: int) -> None:
        """Give up the row's blocks."""
        self._rows.end(row)
        for group in self._groups:
            group.free(row)


def _agreed(groups: Sequence[RowBlocks], nodes: Sequence[int], most: int) -> int:
    """Blocks of the longest prefix, at most `most`, that these groups can all serve."""
    while True:  # a prefix that one group shortens may be too long for another in turn
        shortest = min((group.longest_hit(nodes, most) for group in groups), default=most)
        if shortest == most or len(groups) == 1:
            return shortest
        most = shortest


def _first_blocks_needed(specs: Sequence[KVCacheSpec], num_blocks: int) -> list[int]:
    """Per group: `first_block_needed`."""
    return [spec.first_block_needed(num_blocks) for spec in specs]
