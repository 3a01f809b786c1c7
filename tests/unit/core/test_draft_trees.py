from __future__ import annotations

import numpy as np
import pytest

from quire.core.draft_trees import (
    MOST_TREES,
    depth_first,
    depths,
    first_path,
    num_scratch_blocks,
    reordered,
    with_trees,
)
from quire.core.scheduler_output import DraftTokens

PARENTS = np.array([-1, -1, 0, 0, 1, 2, 4], dtype=np.int32)  # 0 -> 2 -> 5, 0 -> 3; 1 -> 4 -> 6


def test_depth_first_order_puts_drafts_right_behind_their_parents_where_it_can() -> None:
    order = depth_first(PARENTS)
    assert order.tolist() == [0, 2, 5, 3, 1, 4, 6]
    parents = reordered(PARENTS, order)
    assert parents.tolist() == [-1, 0, 1, 0, -1, 4, 5]
    assert depths(parents).tolist() == [1, 2, 3, 2, 1, 2, 3]


def test_the_first_path_is_a_chain_of_first_children() -> None:
    assert first_path(PARENTS).tolist() == [0, 2, 5]
    assert first_path(np.array([-1, 0, 1])).tolist() == [0, 1, 2]


@pytest.mark.parametrize("parents", [[0], [-1, 1], [-1, -2], [-1, 3, 0, 0]])
def test_a_draft_must_come_behind_its_parent(parents: list[int]) -> None:
    with pytest.raises(ValueError, match="does not come before it"):
        depth_first(np.array(parents))


def test_a_message_gets_the_trees_of_rows_as_far_as_their_drafts_are_planned() -> None:
    drafts = DraftTokens(np.array([4, 0, 2], np.int32), np.array([10, 11, 12, 13, 20, 21], np.int32))
    found = with_trees(drafts, np.array([5, 6, 7]), {5: PARENTS})
    assert found.token_ids.tolist() == [10, 12, 13, 11, 20, 21]
    assert found.parents is not None and found.parents.tolist() == [-1, 0, 0, -1, -1, 0]
    assert with_trees(drafts, np.array([5, 6, 7]), {7: np.array([-1, 0, 0])}) is drafts


def test_each_leaf_but_one_needs_the_blocks_of_a_path() -> None:
    tree = ((0,), (1,), (0, 0), (0, 1), (1, 0))
    assert num_scratch_blocks(tree, 100, 16) == MOST_TREES * 2 * 2
    assert num_scratch_blocks(tree, 2, 16) == 2 * 2 * 2
    assert num_scratch_blocks(((0,), (0, 0)), 100, 16) == num_scratch_blocks((), 100, 16) == 0
