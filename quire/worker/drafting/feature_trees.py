"""FeatureTrees: a head on features drafts several tokens for each place, as a tree of given paths, level by level.

Called by `FeatureDrafts` for a few rows. The nodes of a level that have children are one pass: each reads the feature
and the token of its parent's path, and the likeliest tokens of its own feature become its children, by rank. A path
is drafted as a chain would be, bit by bit.

Source: Li et al. 2024 (EAGLE), section 3.2.
"""

from __future__ import annotations

import numpy as np
import torch

from quire.config.token_tree import MAX_DEPTH, Tree
from quire.core.draft_trees import most_blocks_of_path
from quire.models.heads.feature_head import FeatureHead
from quire.sample.ops.interface import SamplingOps
from quire.worker.drafting.feature_passes import FeaturePasses
from quire.worker.drafting.inputs import DraftInputs, ModelDrafts
from quire.worker.drafting.node_tails import NodeTails
from quire.worker.drafting.tree_drafts import TreePaths, likeliest_paths, likely_tokens, paths_of


class FeatureTrees:
    """Keeps nothing from step to step but scratch blocks.

    Args:
        tree: paths, parents first.
        scratch: [max_rows, num_tails, num_blocks] int32; blocks that no request has, for paths that are not in the
            rows' own (`scratch_of`).
        least_chance: behind a draft whose chance is less there are none.

    Attributes:
        max_rows: most trees at once.
        depth: of the tree.
    """

    def __init__(
        self,
        head: FeatureHead,
        tree: Tree,
        passes: FeaturePasses,
        ops: SamplingOps,
        scratch: np.ndarray,
        least_chance: float = 0.0,
    ) -> None:
        self.max_rows = len(scratch)
        self._paths = paths_of(tree, MAX_DEPTH)
        self.depth = self._paths.depth
        self._passes = passes
        self._ops = ops
        self._target_ids = head.target_ids if head.has_own_vocabulary else None
        self._least_chance = least_chance
        parents = self._paths.parents
        self._children = [np.flatnonzero(parents == node) for node in (*range(len(parents)), -1)]
        self._num_children = np.array([len(of_one) for of_one in self._children])
        self._tails = tails_of(self._paths)
        own = np.full_like(scratch[:, :1], -1)
        self._blocks_of_tail = np.concatenate((own, scratch), axis=1)

    def propose(
        self, inputs: DraftInputs, known: np.ndarray, features: torch.Tensor, longest: np.ndarray
    ) -> ModelDrafts:
        """Trees behind the newest tokens.

        Args:
            known: [k], at most `max_rows`; numbers of the rows to draft for.
            features: [k, hidden_size]; of their newest tokens.
            longest: [n] int; most drafts of a path of each row.
        """
        n, width = len(inputs.rows), len(self._paths.parents)
        token_ids, chances = np.zeros((n, width), dtype=np.int32), np.zeros((n, width), dtype=np.float32)
        place = np.zeros(n, dtype=np.intp)  # of a row among the trees
        place[known] = np.arange(len(known))
        entries, nodes = known, np.full(len(known), -1)
        for depth in range(1, self.depth + 1):
            lines, entries, nodes = self._take_in(features, entries, nodes, token_ids, chances)
            is_wanted = (self._num_children[nodes] > 0) & (depth < longest[entries])
            is_wanted &= (chances[entries, nodes] > 0) & (chances[entries, nodes] >= self._least_chance)
            if not is_wanted.any():
                break
            lines, entries, nodes = lines[is_wanted], entries[is_wanted], nodes[is_wanted]
            tails = self._tails_of(inputs.num_tokens[entries] - 1, place[entries], nodes)
            positions = inputs.num_tokens[entries] + depth - 2
            features = self._passes.forward(
                inputs.rows[entries], positions, np.ones_like(positions), token_ids[entries, nodes],
                features.index_select(0, self._passes.index(lines)), tails=tails,
            )  # fmt: skip
        return likeliest_paths(token_ids, chances, self._paths.parents, inputs.max_tokens)

    def _take_in(
        self, features: torch.Tensor, entries: np.ndarray, nodes: np.ndarray, token_ids: np.ndarray, chances: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Put tokens and chances of the children of `nodes` ([m]; -1 = newest tokens) into [n, num_nodes] arrays.

        Returns:
            Of each child the line of `features` that it follows, its row's entry, and its number.
        """
        ids, probabilities = likely_tokens(self._ops, self._passes.compute_logits, features, self._paths.num_ranks)
        ids = ids if self._target_ids is None else self._target_ids(ids)
        lines = np.repeat(np.arange(len(nodes)), self._num_children[nodes])
        children = np.concatenate([self._children[node] for node in nodes.tolist()])
        owners, parents, ranks = entries[lines], nodes[lines], self._paths.ranks[children]
        above = np.where(parents < 0, np.float32(1.0), chances[owners, parents])
        token_ids[owners, children] = ids[lines, ranks]
        chances[owners, children] = probabilities[lines, ranks] * above
        return lines, owners, children

    def _tails_of(self, bases: np.ndarray, places: np.ndarray, nodes: np.ndarray) -> NodeTails | None:
        """Of these nodes of trees; None = all are in their rows' own blocks."""
        tails, parents = self._tails[nodes], self._tails[self._paths.parents[nodes]]
        if not tails.any():
            return None
        return NodeTails(bases, self._blocks_of_tail[places, tails], self._blocks_of_tail[places, parents])


def tails_of(paths: TreePaths) -> np.ndarray:
    """[num_nodes + 1] which path each node with children is in while it is computed; the last is the newest token.

    The first of a node's children that have children goes on in its path, 0 = the one in the row's own blocks.
    """
    parents = paths.parents.tolist()
    has_children, is_taken = set(parents), set[int]()
    tails, num_tails = np.zeros(len(parents) + 1, dtype=np.intp), 1
    for node, parent in enumerate(parents):  # parents come first
        if node in has_children:
            tails[node] = num_tails if parent in is_taken else tails[parent]
            num_tails += parent in is_taken
            is_taken.add(parent)
    return tails


def scratch_of(scratch_ids: np.ndarray, tree: Tree, max_rows: int, block_size: int) -> np.ndarray:
    """[max_rows, num_tails, num_blocks] int32 blocks of the paths that are not in the rows' own.

    Args:
        scratch_ids: [.] integers; as many as `num_scratch_blocks` says, or more.
        block_size: tokens per block.
    """
    num_tails, size = int(tails_of(paths_of(tree, MAX_DEPTH)).max()), most_blocks_of_path(tree, block_size)
    num_ids = max_rows * num_tails * size
    return scratch_ids[:num_ids].reshape(max_rows, num_tails, size).astype(np.int32)
