"""The blocks: who uses each one, what is free, what is cached.

Called by the single-type managers; the scheduler sees only `KVCacheManager`. Owns reference counts, the free lists and
the prefix index. A block id never changes meaning while a request holds it. Where blocks are of different bytes there
are several pools, each with a free list of its own; their ids are numbered through (`KVCacheConfig`), so all else is
one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from quire.kv_cache.block_demand import PoolCounts
from quire.kv_cache.block_hash import BlockHashFn, sha256_block_hash
from quire.kv_cache.free_list import FreeList
from quire.kv_cache.prefix_index import PrefixIndex

NULL_BLOCK_ID = 0
"""A block that is never given out: the target of padding."""


class BlockPool:
    """`num_blocks` blocks, the null block of each pool included.

    Args:
        is_whole, hash_fn, has_state: as `PrefixIndex` has them.
        pool_sizes: blocks of each pool; empty = there is one.

    Attributes:
        num_usable_blocks: blocks without null blocks.
        usable_counts: the same, pool for pool.
        prefix_index: which blocks of which group can be found by their content; managers look up and publish there.
    """

    def __init__(
        self,
        num_blocks: int,
        is_whole: Sequence[bool] = (True,),
        hash_fn: BlockHashFn = sha256_block_hash,
        pool_sizes: Sequence[int] = (),
        has_state: Sequence[bool] = (),
    ) -> None:
        first, *more = pool_sizes or (num_blocks,)
        assert first + sum(more) == num_blocks, "block ids are numbered through"
        self.usable_counts: PoolCounts = tuple(size - 1 for size in (first, *more))
        self.num_usable_blocks = sum(self.usable_counts)
        self._ref_counts = np.zeros(num_blocks, dtype=np.int32)
        self._free = FreeList(first)
        self._more_free: list[FreeList] = []
        for size in more:
            self._more_free.append(FreeList(size, first))
            first += size
        self.prefix_index = PrefixIndex(num_blocks, is_whole, hash_fn, has_state)

    @property
    def num_free_blocks(self) -> int:
        """Blocks not in use, cached ones included."""
        return len(self._free) + sum(map(len, self._more_free))

    def free_counts(self) -> PoolCounts:
        """Blocks not in use, cached ones included, pool for pool."""
        return (len(self._free), *map(len, self._more_free))

    @property
    def num_cached_blocks(self) -> int:
        """Blocks that can be found by their content, in use or free."""
        return len(self.prefix_index)

    @property
    def usage(self) -> float:
        """Share of blocks in use, null blocks excluded, of the pool that is used most."""
        if not self._more_free:
            return 1.0 - len(self._free) / self.num_usable_blocks
        shares = zip(self.free_counts(), self.usable_counts, strict=True)
        return max(1.0 - num_free / num_usable for num_free, num_usable in shares)

    def ref_counts(self) -> np.ndarray:
        """[num_blocks] int32, a copy: how many requests use each block."""
        return np.array(self._ref_counts)

    def eviction_order(self, pool: int = 0) -> np.ndarray:
        """[num_cached] int32: cached blocks of a pool that no request uses, the next to be evicted first."""
        return (self._more_free[pool - 1] if pool else self._free).eviction_order()

    def has_other_users(self, block_ids: np.ndarray) -> np.ndarray:
        """[n] bool: whether blocks of one user have others beside it."""
        has_others: np.ndarray = self._ref_counts[block_ids] > 1
        return has_others

    def take(self, num_blocks: int, pool: int = 0) -> np.ndarray:
        """Give out free blocks, [num_blocks] int32; what was cached in them is forgotten. As many must be free."""
        block_ids = (self._more_free[pool - 1] if pool else self._free).take(num_blocks)
        self.prefix_index.forget(block_ids[self.prefix_index.is_cached[block_ids]])
        self._ref_counts[block_ids] = 1
        return block_ids

    def num_free_among(self, block_ids: np.ndarray) -> int:
        """How many of these cached blocks are not in use, so that sharing them shrinks the free list."""
        return len(block_ids) - int(np.count_nonzero(self._ref_counts[block_ids]))

    def num_leading_shared(self, block_ids: np.ndarray, own_block_ids: np.ndarray) -> int:
        """How many of these distinct blocks, from the first on, have users besides the one of `own_block_ids`."""
        has_others = self._ref_counts[block_ids] > np.isin(block_ids, own_block_ids)
        return len(block_ids) if has_others.all() else int(has_others.argmin())

    def share(self, block_ids: np.ndarray) -> None:
        """Add a user to each of these distinct blocks, which are cached or in use."""
        unused = block_ids[self._ref_counts[block_ids] == 0]
        if len(unused):
            for free, ids in self._by_pool(unused):
                free.remove_cached(ids)
        self._ref_counts[block_ids] += 1

    def free(self, block_ids: np.ndarray) -> None:
        """Take one user off each of a request's blocks, given in the order of its tokens; its tail is evicted first."""
        self._ref_counts[block_ids] -= 1
        counts = self._ref_counts[block_ids]
        assert not (counts < 0).any(), "a block was freed more often than it was allocated"
        self._push(block_ids[counts == 0][::-1])

    def free_of_many(self, block_ids: np.ndarray) -> None:
        """Take one user off each of these blocks, which belong to several requests, so one may occur repeatedly."""
        np.subtract.at(self._ref_counts, block_ids, 1)
        self._push(np.fromiter(dict.fromkeys(block_ids[self._ref_counts[block_ids] == 0].tolist()), dtype=np.int32))

    def drop(self, block_ids: np.ndarray) -> None:
        """Forget what is cached in these distinct blocks; those not in use are given out before cached ones."""
        if not len(block_ids):
            return
        for free, ids in self._by_pool(block_ids[self._ref_counts[block_ids] == 0]):
            free.remove_cached(ids)
            free.push_plain(ids)
        self.prefix_index.forget(block_ids, is_evicted=False)

    def _push(self, unused: np.ndarray) -> None:
        for free, ids in self._by_pool(unused):
            is_cached = self.prefix_index.is_cached[ids]
            free.push_cached(ids[is_cached])
            free.push_plain(ids[~is_cached])

    def _by_pool(self, block_ids: np.ndarray) -> list[tuple[FreeList, np.ndarray]]:
        """The free list of each pool, and which of these blocks are of it."""
        if not self._more_free:
            return [(self._free, block_ids)]
        parts, rest = [], block_ids
        for free in reversed(self._more_free):
            is_here = rest >= free.null_id
            parts.append((free, rest[is_here]))
            rest = rest[~is_here]
        return [(self._free, rest), *parts]

    def reset_prefix_cache(self) -> bool:
        """Forget all cached blocks; False, and nothing done, while any block is in use."""
        if self.num_free_blocks != self.num_usable_blocks:
            return False
        self.prefix_index.clear()
        for free in (self._free, *self._more_free):
            free.reset()
        return True
