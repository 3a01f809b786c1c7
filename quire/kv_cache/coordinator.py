"""The one place that knows how many KV cache groups there are: it turns calls into one call per group.

Called by `KVCacheManager`. Owns the single-type managers, which share one block pool, and how far each row's tokens are
in the prefix tree. Asks no group of which kind it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from quire.core.kv_spec import KVCacheConfig
from quire.core.request import ExtraKeys, Request
from quire.core.scheduler_output import NewBlocks
from quire.errors import UnsupportedError
from quire.kv_cache.block_counts import longest_sequence, num_blocks_held
from quire.kv_cache.block_demand import BlockDemand
from quire.kv_cache.cached_prefix import CachedPrefix
from quire.kv_cache.prefix_tree import ROOT
from quire.kv_cache.row_prefixes import RowPrefixes
from quire.kv_cache.single_type.managers import make_manager
from quire.kv_cache.single_type.row_blocks import NO_IDS, ManagerParts, RowBlocks


class KVCacheCoordinator:
    """Blocks of all groups: at most one that keeps whole sequences, which is the first, and others that free blocks.

    Attributes:
        finds_prefixes: blocks of every group can serve another request, so prefixes are worth publishing.
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
        self._keeps_sequences = [spec.keeps_sequence for spec in specs]
        self.finds_prefixes = all(spec.is_shareable for spec in specs)
        self._groups = [make_manager(spec, parts, number) for number, spec in enumerate(specs)]
        self._rows = RowPrefixes(parts.pool.prefix_index.tree, parts.max_num_seqs, self._block_size)

    @property
    def longest_sequence(self) -> int | None:
        """Blocks of tokens of the longest request that runs when alone; None = there is no longest one."""
        return longest_sequence(self._pool.num_usable_blocks, self._most)

    def num_blocks_held(self, num_tokens: np.ndarray) -> np.ndarray:
        """[.] most blocks, all groups together, that requests of `num_tokens` ([.]) tokens hold at once."""
        return np.asarray(num_blocks_held(-(-num_tokens // self._block_size), self._most))

    def num_blocks_shared(self, num_tokens: int) -> int:
        """Full blocks that requests with the same first `num_tokens` tokens can share whatever they grow to."""
        return num_tokens // self._block_size * sum(self._keeps_sequences)

    def find(self, request: Request, max_blocks: int) -> CachedPrefix:
        """The longest cached prefix of a request, at most `max_blocks` blocks."""
        nodes = self._pool.prefix_index.tree.walk(request.block_tokens, request.extra_keys, max_blocks)
        agreed = len(nodes)
        while True:  # a prefix that one group shortens may be too long for another in turn
            shortest = min(group.longest_hit(nodes, agreed) for group in self._groups)
            if shortest == agreed or len(self._groups) == 1:
                break
            agreed = shortest
        block_ids = tuple(group.cached_block_ids(nodes, shortest) for group in self._groups)
        return CachedPrefix(block_ids, shortest * self._block_size, node=nodes[shortest - 1] if shortest else ROOT)

    def demand(self, prefix: CachedPrefix, num_tokens: int, num_freed: Sequence[int] | None) -> BlockDemand:
        """By how many blocks `place` shrinks the free list.

        Of more tokens than a step computes, no more blocks are counted than are held at once.
        """
        num_new = 0
        for group, shared, num_blocks in self._starts(prefix, num_freed):
            num_new += group.num_new_blocks(len(shared), num_blocks, num_tokens) + self._pool.num_free_among(shared)
        return BlockDemand(num_new)

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
        return tuple(group.extend(row, num_tokens) for group in self._groups)

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

    def is_computing(self, node: int, block: int, tokens: bytes, extra_keys: ExtraKeys) -> bool:
        """Whether a row is about to fill and publish block number `block`, of this content, after a prefix."""
        return self._rows.is_computing(node, block, tokens, extra_keys)

    def free_beyond(self, row: int, num_tokens: int) -> None:
        """Give up the row's blocks that hold none of its first `num_tokens` tokens."""
        for group in self._groups:
            group.free_beyond(row, num_tokens)

    def free(self, row: int) -> None:
        """Give up the row's blocks."""
        self._rows.end(row)
        for group in self._groups:
            group.free(row)
