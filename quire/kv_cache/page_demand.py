"""PageDemand: how many pages a request asks for when it gets a row, as a value that admission weighs.

Made by `KVCacheManager.demand`. Example: with pages of 16 tokens, a prompt of 100 tokens with 32 cached ones asks for
5 fresh pages; where one of the two cached pages is in no use, taking it shrinks the free list, too, so `new` is 6.
Beside running requests that may still take 10 pages it fits when 16 are free: `demand.beside(10).lacking(16) == 0`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PageDemand:
    """Pages of all groups together.

    Attributes:
        new: by how many the free list shrinks when the request gets its row.
        reserved: how many are left free beside that, for requests that run.
    """

    new: int
    reserved: int = 0

    def beside(self, num_blocks: int) -> PageDemand:
        """The demand with so many more pages left free."""
        return PageDemand(self.new, self.reserved + num_blocks)

    def lacking(self, num_free_blocks: int) -> int:
        """Pages that are missing; 0 = it is met."""
        return max(0, self.new + self.reserved - num_free_blocks)
