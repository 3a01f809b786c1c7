"""Prefixes whose blocks are kept outside the cache, by KV cache group: names of blocks, and how much can be loaded.

Called by the scheduler's tiers. Pure functions. A name says which prefix a block ends and which group it is of. Groups
that free blocks, and recurrent states, need few blocks of a prefix (`KVCacheSpec.first_block_needed`), so the longest
prefix that is there is not found by going on until the first block that is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from quire.core.kv_spec import KVCacheSpec

Find = Callable[[int, int, int], np.ndarray]
"""(group, first, end) -> [end - first] bool: which of the blocks of these numbers are there."""


def group_name(name: bytes, group: int) -> bytes:
    """The name of a block of a group, from that of its prefix (`KVCacheManager.name_blocks`), which group 0 has."""
    return name[:-1] + bytes([name[-1] ^ group]) if group else name


def longest_stored_prefix(specs: Sequence[KVCacheSpec], find: Find, num_cached: int, most: int) -> int:
    """Blocks of the longest prefix that can be loaded; `num_cached` = none is longer.

    Args:
        specs: of each group.
        find: says what is there.
        num_cached: blocks of the prefix that the cache has, of all groups.
        most: that the prefix may have.
    """
    for group, spec in enumerate(specs):
        if spec.keeps_sequence and most > num_cached:
            is_here = find(group, num_cached, most)
            most = num_cached + (len(is_here) if is_here.all() else int(is_here.argmin()))
    runs = {
        group: _run_lengths(find(group, num_cached, most))
        for group, spec in enumerate(specs)
        if most > num_cached and not spec.keeps_sequence
    }
    for end in range(most, num_cached, -1):
        needed = ((run[end - 1 - num_cached], specs[group].first_block_needed(end)) for group, run in runs.items())
        if all(run >= end - max(num_cached, first) for run, first in needed):
            return end
    return num_cached


def _run_lengths(is_here: np.ndarray) -> list[int]:
    """For each of [n] bool how many in a row, itself the last, are true."""
    runs, length = list[int](), 0
    for one in is_here.tolist():
        length = length + 1 if one else 0
        runs.append(length)
    return runs
