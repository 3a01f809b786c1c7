"""How many pages requests hold in each KV cache group. Pure functions, used for planning and for admission alike."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from quire.core.kv_spec import AttentionSpec

MostBlocks = Sequence[int | None]
"""Per group: most pages that a request holds at once; None = as many as its tokens need."""


def most_blocks(spec: AttentionSpec, max_chunk_tokens: int) -> int | None:
    """Most pages that a request holds at once in a group, when a step computes at most `max_chunk_tokens` of it.

    Pages are freed once neither the newest computed query saw them nor a later one does, so a request holds what that
    query saw and the step's own tokens, wherever these begin in a page.
    """
    if spec.num_tokens_seen is None:
        return None
    return max_pages_touched(spec.num_tokens_seen + max_chunk_tokens, spec.block_size)


def max_pages_touched(num_tokens: int, block_size: int) -> int:
    """Pages that `num_tokens` (at least one) consecutive tokens lie in, at worst."""
    return -(-(num_tokens - 1) // block_size) + 1


def num_blocks_held(num_blocks: int | np.ndarray, most: MostBlocks) -> int | np.ndarray:
    """Most pages, all groups together, that a request of `num_blocks` pages of tokens holds at once."""
    return sum(num_blocks if limit is None else np.minimum(num_blocks, limit) for limit in most)


def longest_sequence(num_usable_blocks: int, most: MostBlocks) -> int | None:
    """Pages of tokens of the longest request that runs when alone; None = there is no longest one."""
    limits = sorted(limit for limit in most if limit is not None)
    num_growing, num_left = len(most), num_usable_blocks
    for limit in limits:
        if num_growing * limit > num_left:
            break
        num_growing, num_left = num_growing - 1, num_left - limit
    return num_left // num_growing if num_growing else None
