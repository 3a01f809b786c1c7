"""The blocks: who uses each one, what is free, what is cached.

Called by the single-type managers; the scheduler sees only `KVCacheManager`. Owns reference counts, the free
list and the prefix index. A block id never changes meaning while a request holds it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from quire.kv_cache.block_hash import BlockHashFn, sha256_block_hash
from quire.kv_cache.free_list import FreeList
from quire.kv_cache.prefix_index import PrefixIndex

NULL_BLOCK_ID = 0
"""A block that is never given out: the target of padding."""


class BlockPool:
    """`num_blocks` blocks, the null block included.

    Args:
        is_whole, hash_fn: as `PrefixIndex` has them.

    Attributes:
        num_usable_blocks: blocks without the null block.
        prefix_index: which blocks of which group can be found by their content; managers look up and publish there.
    """

    def __init__(
        self, num_blocks: int, is_whole: Sequence[bool] = (True,), hash_fn: BlockHashFn = sha256_block_hash
    ) -> None:
        self.num_usable_blocks = num_blocks - 1
        self._ref_counts = np.zeros(num_blocks, dtype=np.int32)
        self._free = FreeList(num_blocks)
        self.prefix_index = PrefixIndex(num_blocks, is_whole, hash_fn)

    @property
    def num_free_blocks(self) -> int:
        """Blocks not in use, cached ones included."""
        return len(self._free)

    @property
    def num_cached_blocks(self) -> int:
        """Blocks that can be found by their content, in use or free."""
        return len(self.prefix_index)

    @property
    def usage(self) -> float:
        """Share of blocks in use, null block excluded."""
        return 1.0 - len(self._free) / self.num_usable_blocks

    def ref_counts(self) -> np.ndarray:
        """[num_blocks] int32, a copy: how many requests use each block."""
        return np.array(self._ref_counts)

    def take(self, num_blocks: int) -> np.ndarray:
        """Give out free blocks, [num_blocks] int32; what was cached in them is forgotten. As many must be free."""
        block_ids = self._free.take(num_blocks)
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
        self._free.remove_cached(block_ids[self._ref_counts[block_ids] == 0])
        self._ref_counts[block_ids] += 1

    def free(self, block_ids: np.ndarray) -> None:
        """Take one user off each of a request's blocks, given in the order of its tokens; its tail is evicted first."""
        self._ref_counts[block_ids] -= 1
        counts = self._ref_counts[block_ids]
        assert not (counts < 0).any(), "a block was freed more often than it was allocated"
        unused = block_ids[counts == 0][::-1]
        is_cached = self.prefix_index.is_cached[unused]
        self._free.push_cached(unused[is_cached])
        self._free.push_plain(unused[~is_cached])

    def free_of_many(self, block_ids: np.ndarray) -> None:
        """Take one user off each of these blocks, which belong to several requests, so one may occur repeatedly."""
        np.subtract.at(self._ref_counts, block_ids, 1)
        unused = np.fromiter(dict.fromkeys(block_ids[self._ref_counts[block_ids] == 0].tolist()), dtype=np.int32)
        is_cached = self.prefix_index.is_cached[unused]
        self._free.push_cached(unused[is_cached])
        self._free.push_plain(unused[~is_cached])

    def reset_prefix_cache(self) -> bool:
        """Forget all cached blocks; False, and nothing done, while any block is in use."""
        if len(self._free) != self.num_usable_blocks:
            return False
        self.prefix_index.clear()
        self._free.reset()
        return True
