"""BlockDemand: how many blocks a request asks for when it gets a row, as a value that admission weighs.

Made by `KVCacheManager.demand`. Example: with blocks of 16 tokens, a prompt of 100 tokens with 32 cached ones asks for
5 fresh blocks; where one of the two cached blocks is in no use, taking it shrinks the free list, too, so `new` is 6.
Beside running requests that may still take 10 blocks it fits when 16 are free: `demand.beside(10).lacking(16) == 0`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BlockDemand:
    """Blocks of all groups together.

    Attributes:
        new: by how many the free list shrinks when the request gets its row.
        reserved: how many are left free beside that, for requests that run.
    """

    new: int
    reserved: int = 0

    def beside(self, num_blocks: int) -> BlockDemand:
        """The demand with so many more blocks left free."""
        return BlockDemand(self.new, self.reserved + num_blocks)

    def lacking(self, num_free_blocks: int) -> int:
        """Blocks that are missing; 0 = it is met."""
        return max(0, self.new + self.reserved - num_free_blocks)
