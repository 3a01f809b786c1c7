from __future__ import annotations

import numpy as np
import pytest

from quire.kv_cache.swap_pool import SwapPool


def test_each_page_has_one_owner_until_it_is_freed():
    pool = SwapPool(5)
    first, second = pool.take(2), pool.take(3)
    assert sorted([*first.tolist(), *second.tolist()]) == [0, 1, 2, 3, 4] and pool.num_free_blocks == 0
    pool.free(first)
    assert pool.num_free_blocks == 2 and pool.take(2).tolist() == first.tolist()


def test_neither_too_many_are_taken_nor_freed():
    pool = SwapPool(2)
    with pytest.raises(AssertionError, match="more host blocks than are free"):
        pool.take(3)
    with pytest.raises(AssertionError, match="freed more often"):
        pool.free(np.array([0], dtype=np.int32))
