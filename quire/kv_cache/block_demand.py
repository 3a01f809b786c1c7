"""BlockDemand: how many blocks a request asks for when it gets a row, as a value that admission weighs.

Made by `KVCacheManager.demand`. Example: with blocks of 16 tokens, a prompt of 100 tokens with 32 cached ones asks for
5 fresh blocks; where one of the two cached blocks is in no use, taking it shrinks the free list, too, so `new` is 6.
Beside running requests that may still take 10 blocks it fits when 16 are free: `demand.beside((10,)).lacking((16,)) ==
0`.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

PoolCounts = tuple[int, ...]
"""A number of blocks of each pool."""


def add_counts(counts: PoolCounts, others: PoolCounts) -> PoolCounts:
    """The sums, pool for pool."""
    return tuple(map(operator.add, counts, others))


@dataclass(frozen=True, slots=True)
class BlockDemand:
    """Blocks of all groups together, pool for pool.

    Attributes:
        new: by how many the free lists shrink when the request gets its row.
        reserved: how many are left free beside that, for requests that run; empty = none.
    """

    new: PoolCounts
    reserved: PoolCounts = ()

    def beside(self, counts: PoolCounts) -> BlockDemand:
        """The demand with so many more blocks left free."""
        return BlockDemand(self.new, add_counts(self.reserved, counts) if self.reserved else counts)

    def at_least(self, other: BlockDemand) -> BlockDemand:
        """The demand with as many new blocks of each pool as the larger of the two has."""
        return BlockDemand(tuple(map(max, self.new, other.new)), self.reserved)

    def lacking(self, num_free: PoolCounts) -> int:
        """Blocks that are missing, all pools together, where so many are free; 0 = it is met."""
        needed = add_counts(self.new, self.reserved) if self.reserved else self.new
        if len(needed) == 1:
            return max(0, needed[0] - num_free[0])
        return sum(max(0, num - free) for num, free in zip(needed, num_free, strict=True))
