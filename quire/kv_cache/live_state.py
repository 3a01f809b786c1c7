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
from quire.kv_cache.block_pool import NULL_BLOCK_ID, BlockPool
from quire.kv_cache.prefix_index import PrefixIndex
from quire.kv_cache.prefix_tree import ROOT, PrefixTree

MAX_WALK = 1536
MAX_CHILDREN = 1024


def block_maps(
    pool: BlockPool, rows: np.ndarray, blocks_of_rows: Sequence[np.ndarray]
) -> tuple[list[BlockMap], np.ndarray]:
    """One map for each pool of blocks, and [num_rows] how many blocks each row holds.

    Args:
        rows: [num_rows] the running rows, those placed first first.
        blocks_of_rows: [num_blocks] int32 each: the blocks of these rows, the null block among them where one is freed.
    """
    counts, is_cached = pool.ref_counts(), pool.prefix_index.is_cached
    num_held = np.zeros(len(rows), dtype=np.int64)
    owners = np.where(counts > 0, OTHER, np.where(is_cached, CACHED, FREE)).astype(np.int32)
    ages = np.zeros(len(counts), dtype=np.int32)
    if len(rows):
        lengths = np.array([len(ids) for ids in blocks_of_rows])
        block_ids = np.concatenate(blocks_of_rows)
        owners[block_ids] = np.repeat(rows, lengths)
        places = np.linspace(100, 0, len(rows)) if len(rows) > 1 else np.zeros(1)
        ages[block_ids] = np.repeat(places.astype(np.int32), lengths)
        row_of_block = np.repeat(np.arange(len(rows)), lengths)
        num_held = np.bincount(row_of_block[block_ids != NULL_BLOCK_ID], minlength=len(rows))
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
    return maps, num_held


def _map_of(owners: np.ndarray, ages: np.ndarray, num_used: int) -> BlockMap:
    per_cell = -(-len(owners) // MAX_CELLS) or 1
    num_cached = int(np.count_nonzero(owners == CACHED))
    return BlockMap(
        num_blocks=len(owners), used=num_used, cached=num_cached, free=len(owners) - num_used - num_cached,
        blocks_per_cell=per_cell, owners=owners[::per_cell].tolist(), ages=ages[::per_cell].tolist(),
    )  # fmt: skip


def prefix_map(index: PrefixIndex) -> PrefixMap:
    """The prefix tree from its root on, runs of blocks without a branch as one node, those with many users first."""
    tree, cached, num_walked = index.tree, index.blocks[0], 0
    nodes: list[PrefixNode] = []
    due = deque(_children(tree, ROOT))
    while due and len(nodes) < MAX_PREFIXES and num_walked < MAX_WALK:
        first = node = due.popleft()
        num_blocks, num_cached = 1, int(node in cached)
        while len(children := _children(tree, node)) == 1 and num_walked < MAX_WALK:
            node = children[0]
            num_blocks, num_cached, num_walked = num_blocks + 1, num_cached + (node in cached), num_walked + 1
        num_walked += 1
        due.extend(children)
        nodes.append(
            PrefixNode(
                id=node, parent=tree.parent(first), num_blocks=num_blocks, cached_blocks=num_cached,
                users=tree.num_users(node), num_children=len(children), is_salted=bool(tree.extra_keys(first)),
            )
        )  # fmt: skip
    is_cut = bool(due) or num_walked >= MAX_WALK
    return PrefixMap(num_nodes=len(tree), num_cached_blocks=len(index), nodes=nodes, is_cut=is_cut)


def _children(tree: PrefixTree, node: int) -> list[int]:
    children = tree.siblings.all_after(node, MAX_CHILDREN)
    return children if len(children) < 2 else sorted(children, key=tree.num_users, reverse=True)
