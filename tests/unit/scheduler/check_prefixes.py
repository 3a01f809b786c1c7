"""Invariants of the prefix index, for the tests of the scheduler."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from quire.kv_cache.cached_prefix import CachedPrefix
from quire.kv_cache.prefix_index import PrefixIndex
from quire.kv_cache.prefix_tree import ROOT


def check_prefixes(index: PrefixIndex, row_nodes: Sequence[int], pinned: Sequence[CachedPrefix]) -> None:
    """Each prefix has as many users as there are, and each cached block is one of a single prefix."""
    tree = index.tree
    users = Counter(row_nodes)
    users.update(prefix.node for prefix in pinned if prefix.node is not None)
    users.update(node for blocks in index.blocks for node in blocks)
    users.update(list(index.past._reasons))
    users.update(list(index.past_states._reasons))
    users.update(key[0] for key in tree._nodes)
    del users[ROOT]
    assert users == tree._num_users, "a prefix outlives its users, or they outlive it"
    assert len(tree._keys) == len(tree._nodes)
    cached = sorted(block_id for blocks in index.blocks for block_id in blocks.values())
    assert cached == np.flatnonzero(index.is_cached).tolist(), "a page is cached twice, or not where it is said to be"
