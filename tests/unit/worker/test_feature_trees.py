"""Where the nodes of a tree lie while a head drafts it, and which drafts are made of their chances."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quire.config.token_tree import MAX_DEPTH, parse_tree
from quire.core.draft_trees import MOST_TREES, num_scratch_blocks
from quire.sample.ops.torch_ops import TorchSamplingOps
from quire.worker.drafting.feature_trees import scratch_of, tails_of
from quire.worker.drafting.node_tails import NodeTails, place_nodes
from quire.worker.drafting.tree_drafts import likeliest_paths, likely_tokens, paths_of

TREE = parse_tree("[(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 1, 0), (0, 1, 0, 0), (1, 0, 0)]")


def test_the_first_child_with_children_goes_on_in_its_parents_blocks() -> None:
    by_path = dict(zip(TREE, tails_of(paths_of(TREE, MAX_DEPTH)).tolist(), strict=False))
    assert [by_path[(0,)], by_path[(1,)]] == [0, 1]
    assert [by_path[(0, 0)], by_path[(0, 1)], by_path[(1, 0)]] == [0, 2, 1]
    assert by_path[(0, 1, 0)] == 2


@pytest.mark.parametrize("block_size", [2, 16])
def test_scratch_blocks_are_distinct_and_no_more_than_those_of_steps_with_trees(block_size: int) -> None:
    ids = np.arange(num_scratch_blocks(TREE, 12, block_size))
    scratch = scratch_of(ids, TREE, MOST_TREES, block_size)
    assert scratch.shape == (MOST_TREES, 2, -(-4 // block_size) + 1)
    assert len(np.unique(scratch)) == scratch.size <= len(ids)


def test_a_node_that_leaves_its_parents_path_copies_what_is_before_it() -> None:
    """The example of `node_tails`, behind another block, and one at the beginning of a block, without ancestors."""
    own = np.array([[3, 4], [3, 4], [5, 6]], dtype=np.int32)
    none, tail = [-1, -1], [8, 9]
    tails = NodeTails(np.array([21, 21, 16]), np.array([none, tail, [7, 2]]), np.array([none, none, none]))
    placed = place_nodes(tails, own, at=np.array([22, 22, 16]), bases=np.array([21, 21, 16]), block_size=16)
    assert placed.table.tolist() == [[3, 4], [3, 8], [5, 7]]
    assert placed.slots.tolist() == [4 * 16 + 6, 8 * 16 + 6, 7 * 16]
    assert placed.copied_slots is not None
    assert placed.copied_slots.tolist() == [list(range(64, 70)), list(range(128, 134))]


def test_likely_paths_come_first_each_behind_its_parent_and_impossible_ones_not_at_all() -> None:
    parents = np.array([-1, -1, 0, 1], dtype=np.int32)
    chances = np.array([[0.4, 0.5, 0.4, 0.0], [0.9, 0.05, 0.1, 0.01]], dtype=np.float32)
    found = likeliest_paths(np.array([[1, 2, 3, 4]] * 2), chances, parents, np.array([9, 2]))
    assert found.counts.tolist() == [3, 2] and found.parents is not None
    assert found.token_ids.tolist() == [2, 1, 3, 1, 3] and found.parents.tolist() == [-1, -1, 1, -1, 0]
    np.testing.assert_allclose(found.scores, [0.5, 0.8, 1.0, 0.9, 0.1 / 0.9], rtol=1e-6)


def test_a_small_vocabulary_has_no_tokens_of_high_ranks_and_nan_has_none() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0], [float("nan")] * 3])
    ids, probabilities = likely_tokens(TorchSamplingOps(), lambda lines: lines, logits, 5)
    assert ids[0, :3].tolist() == [1, 2, 0]
    np.testing.assert_allclose(probabilities[0, :3], logits[0].softmax(0)[[1, 2, 0]], rtol=1e-6)
    assert not probabilities[0, 3:].any() and not probabilities[1].any()
