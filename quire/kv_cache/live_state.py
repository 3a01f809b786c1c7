"""The blocks and the prefix tree at one moment, as bounded summaries for people.

Called by the KV cache manager when someone asks for the state of the engine. Reads, and changes nothing. The cost is
some array operations over the blocks, and a walk of at most `MAX_WALK` nodes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from quire.core.live_state import (
    CACHED,
    FREE,
    MAX_CELLS,
    MAX_PREFIXES,
    OTHER,
    SHARED,
    BlockMap,
    PrefixMap,
    PrefixNode,
)
from quire.kv_cache.block_pool import BlockPool
from quire.kv_cache.prefix_index import PrefixIndex
from quire.kv_cache.prefix_tree import ROOT

MAX_WALK = 4096
MAX_CHILDREN = 1024


def block_maps(pool: BlockPool, rows: np.ndarray, blocks_of_rows: Sequence[np.ndarray]) -> list[BlockMap]:
    """One map for each pool of blocks.

    Args:
        rows: [num_rows] the running rows, those placed first first.
        blocks_of_rows: [num_blocks] int32 each: the blocks of these rows, the null block among them where one is freed.
    """
    counts, is_cached = pool.ref_counts(), pool.prefix_index.is_cached
    owners = np.where(counts > 0, OTHER, np.where(is_cached, CACHED, FREE)).astype(np.int32)
    ages = np.zeros(len(counts), dtype=np.int32)
    if len(rows):
        lengths = np.array([len(ids) for ids in blocks_of_rows])
        block_ids = np.concatenate(blocks_of_rows)
        owners[block_ids] = np.repeat(rows, lengths)
        places = np.linspace(100, 0, len(rows)) if len(rows) > 1 else np.zeros(1)
        ages[block_ids] = np.repeat(places.astype(np.int32), lengths)
    owners[counts > 1] = SHARED
    for number in range(len(pool.usable_counts)):
        order = pool.eviction_order(number)
        if len(order):
            ages[order] = np.linspace(100, 0, len(order)).astype(np.int32)
    maps, first = [], 0
    for num_usable, num_free in zip(pool.usable_counts, pool.free_counts(), strict=True):
        of_pool = slice(first + 1, first + 1 + num_usable)  # behind the null block
        maps.append(_map_of(owners[of_pool], ages[of_pool], num_usable - num_free))
        first += num_usable + 1
    return maps


def _map_of(owners: np.ndarray, ages: np.ndarray, num_used: int) -> BlockMap:
    per_cell = -(-len(owners) // MAX_CELLS) or 1
    num_cached = int(np.count_nonzero(owners == CACHED))
    return BlockMap(
        num_blocks=len(owners), used=num_used, cached=num_cached, free=len(owners) - num_used - num_cached,
        blocks_per_cell=per_cell, owners=owners[::per_cell].tolist(), ages=ages[::per_cell].tolist(),
    )  # fmt: skip


def prefix_map(index: PrefixIndex) -> PrefixMap:
    """The prefix tree from its root on, runs of blocks without a branch as one node, those with many users first."""
    tree, num_walked = index.tree, 0
    nodes: list[PrefixNode] = []
    due = deque(_children(index, ROOT))
    while due and len(nodes) < MAX_PREFIXES and num_walked < MAX_WALK:
        first = node = due.popleft()
        num_blocks, num_cached = 1, int(index.holds(node))
        children = _children(index, node)
        while len(children) == 1 and num_walked < MAX_WALK:
            node = children[0]
            num_blocks, num_cached, num_walked = num_blocks + 1, num_cached + index.holds(node), num_walked + 1
            children = _children(index, node)
        num_walked += 1
        due.extend(children)
        nodes.append(
            PrefixNode(
                id=node, parent=tree.parent(first), num_blocks=num_blocks, cached_blocks=num_cached,
                users=tree.num_users(node), num_children=len(children), is_salted=bool(tree.extra_keys(first)),
            )
        )  # fmt: skip
    return PrefixMap(num_nodes=len(tree), num_cached_blocks=len(index), nodes=nodes, is_cut=bool(due))


def _children(index: PrefixIndex, node: int) -> list[int]:
    children = index.tree.siblings.all_after(node, MAX_CHILDREN)
    return children if len(children) < 2 else sorted(children, key=index.tree.num_users, reverse=True)
