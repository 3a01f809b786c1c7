"""Trees of drafts: several drafts may stand in one place, each behind its parent. Functions without state.

A row's drafts are numbered from 0, each behind its parent; parent -1 is the row's newest token. Depth-first order puts
as many as possible right behind their parents, so a tree falls into few segments: runs of drafts in which each is the
child of the one before it. A tree has a segment for each of its leaves.

    parents in depth-first order   -1  0  1  0 -1  4      two segments begin anew, with drafts 3 and 4:
                                    0--1--2  3  4--5      0 1 2 behind the newest token, 3 behind 0, 4 5 behind it again
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from quire.config.token_tree import Tree
from quire.core.scheduler_output import DraftTokens

MOST_TREES = 8
"""Most rows of a step with trees, which pay where it is bound by reading weights. With more rows all draft chains."""


def depth_first(parents: np.ndarray) -> np.ndarray:
    """[k] intp: the order in which every draft comes behind its parent and the whole trees of its earlier siblings.

    Args:
        parents: [k] integers; parents[i] < i.

    Raises:
        ValueError: a parent does not come before its child.
    """
    children: list[list[int]] = [[] for _ in range(len(parents) + 1)]
    for draft, parent in enumerate(parents.tolist()):
        if not -1 <= parent < draft:
            raise ValueError(f"draft {draft} has parent {parent}, which does not come before it")
        children[parent].append(draft)  # the newest token's are the last
    order, left = list[int](), children[-1][::-1]
    while left:
        draft = left.pop()
        order.append(draft)
        left += children[draft][::-1]
    return np.array(order, dtype=np.intp)


def reordered(parents: np.ndarray, order: np.ndarray) -> np.ndarray:
    """[n] int32: the parents of the drafts in this order, by their new numbers; no parent is left out."""
    new_number = np.full(len(parents) + 1, -1, dtype=np.int32)
    new_number[order] = np.arange(len(order), dtype=np.int32)
    found: np.ndarray = new_number[parents[order]]
    return found


def first_path(parents: np.ndarray) -> np.ndarray:
    """[.] intp: the drafts of a chain: the first child, its first child, and so on."""
    path, last = list[int](), -1
    for draft, parent in enumerate(parents.tolist()):
        if parent == last:
            path.append(draft)
            last = draft
    return np.array(path, dtype=np.intp)


def depths(parents: np.ndarray) -> np.ndarray:
    """[k] int64: 1 for children of the newest token, 2 for theirs, and so on; `parents` may be those of many trees.

    Args:
        parents: [k] integers; numbers within the array, -1 = the newest token.
    """
    found, above = np.ones(len(parents), dtype=np.int64), parents
    while (has_more := above >= 0).any():
        found += has_more
        above = np.where(has_more, parents[above], -1)
    return found


def with_trees(drafts: DraftTokens, rows: np.ndarray, trees: Mapping[int, np.ndarray]) -> DraftTokens:
    """These drafts with their parents, each row's in depth-first order; as they are, if all are chains.

    Args:
        rows: [num_reqs]
        trees: row -> parents of its drafts, of which the first so many are in `drafts`; rows without have chains.
    """
    token_ids, parents = drafts.token_ids.copy(), np.empty(len(drafts.token_ids), dtype=np.int32)
    ends = np.cumsum(drafts.counts)
    has_tree = False
    for row, end, count in zip(rows.tolist(), ends.tolist(), drafts.counts.tolist(), strict=True):
        own, chain = slice(end - count, end), np.arange(-1, count - 1, dtype=np.int32)
        tree = trees.get(row, chain)[:count]
        order = depth_first(tree)
        token_ids[own], parents[own] = drafts.token_ids[own][order], reordered(tree, order)
        has_tree |= bool((parents[own] != chain).any())
    return dataclasses.replace(drafts, token_ids=token_ids, parents=parents) if has_tree else drafts


def most_blocks_of_path(tree: Tree, block_size: int) -> int:
    """Blocks from the newest token's on that a path of the tree may be in."""
    return -(-max((len(path) for path in tree), default=0) // block_size) + 1


def num_scratch_blocks(tree: Tree, max_num_seqs: int, block_size: int) -> int:
    """Blocks for the paths of a step's trees that are not in the rows' own blocks; 0 = chains are drafted.

    The worker has the last so many blocks of the cache for them, which the scheduler does not know.

    Args:
        tree: `SpeculativeConfig.tree`.
    """
    num_leaves = len(tree) - len({path[:-1] for path in tree if len(path) > 1})
    return min(MOST_TREES, max_num_seqs) * max(num_leaves - 1, 0) * most_blocks_of_path(tree, block_size)
