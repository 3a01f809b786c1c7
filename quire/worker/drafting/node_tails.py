"""Where the nodes of a tree lie while a head drafts it: each path in blocks of its own from its first draft on. Pure.

As in steps with trees (`worker.draft_trees`), a path lies at contiguous positions, so that a node attends to what came
before the tree and to its ancestors alone, with the bits of a chain. The first path of a tree is in the row's own
blocks, where a chain would be, others are in scratch blocks. A node that leaves its parent's path gets copies of what
the parent's blocks hold before it.

    newest token n, drafts a b, a behind n with children c and d; the pair of n is at slot 20; blocks of 16

    level   node    slots   blocks          copied first
    1       a       21      own             -
    2       c       22      own             -
            d       22      own, scratch    slots 16 to 21
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from quire.worker.draft_trees import TreeBlocks, slots_in


class NodeTails(NamedTuple):
    """Of nodes with one parent's depth.

    Attributes:
        bases: [n]; the position of the first draft of each node's tree.
        blocks: [n, num_blocks] scratch blocks of its path from the block of that position on; -1 = the row's own.
        parent_blocks: likewise of its parent's path.
    """

    bases: np.ndarray
    blocks: np.ndarray
    parent_blocks: np.ndarray


def place_nodes(tails: NodeTails, own: np.ndarray, at: np.ndarray, bases: np.ndarray, block_size: int) -> TreeBlocks:
    """Blocks and slots of nodes.

    Args:
        own: [n, num_blocks] int32; of the nodes' rows.
        at, bases: [n]; slots of the nodes, and of their trees' first drafts, within these blocks.
    """
    first = bases // block_size
    table, above = (_with_tail(own, blocks, first) for blocks in (tails.blocks, tails.parent_blocks))
    leaves_path = np.flatnonzero(tails.blocks[:, 0] != tails.parent_blocks[:, 0])
    begins = first[leaves_path] * block_size
    lengths = at[leaves_path] - begins
    nodes, offsets = np.repeat(leaves_path, lengths), np.cumsum(lengths) - lengths
    copied = np.arange(len(nodes)) + np.repeat(begins - offsets, lengths)
    slots = [slots_in(blocks, nodes, copied, block_size) for blocks in (above, table)]
    return TreeBlocks(
        table, slots_in(table, np.arange(len(at)), at, block_size), np.stack(slots) if len(nodes) else None
    )


def _with_tail(own: np.ndarray, blocks: np.ndarray, first: np.ndarray) -> np.ndarray:
    """These blocks in the place of the rows' own from columns `first` on."""
    columns = first[:, None] + np.arange(blocks.shape[1])
    nodes, places = np.nonzero((blocks >= 0) & (columns < own.shape[1]))
    table: np.ndarray = own.copy()
    table[nodes, columns[nodes, places]] = blocks[nodes, places]
    return table
