"""How many blocks requests hold in the KV cache groups of a pool. Pure functions, used by planning and admission."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

MostBlocks = Sequence[int | None]
"""Per group: most blocks that a request holds at once (`KVCacheSpec.most_blocks`); None = what its tokens need."""


def num_blocks_held(num_blocks: int | np.ndarray, most: MostBlocks) -> int | np.ndarray:
    """Most blocks, these groups together, that a request of `num_blocks` blocks of tokens holds at once."""
    return sum(num_blocks if limit is None else np.minimum(num_blocks, limit) for limit in most)


def longest_sequence(num_usable_blocks: int, most: MostBlocks) -> int | None:
    """Blocks of tokens of the longest request that runs when alone; None = there is no longest one."""
    limits = sorted(limit for limit in most if limit is not None)
    num_growing, num_left = len(most), num_usable_blocks
    for limit in limits:
        if num_growing * limit > num_left:
            break
        num_growing, num_left = num_growing - 1, num_left - limit
    return num_left // num_growing if num_growing else None
