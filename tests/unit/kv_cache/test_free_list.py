from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.kv_cache.free_list import FreeList


def ids(*block_ids: int) -> np.ndarray:
    return np.array(block_ids, dtype=np.int32)


def test_all_pages_but_the_null_page_are_free_at_first_lowest_first():
    free = FreeList(5)
    assert len(free) == 4
    assert free.take(4).tolist() == [1, 2, 3, 4]
    assert len(free) == 0


def test_pages_that_hold_nothing_go_out_before_cached_ones():
    free = FreeList(5)
    free.take(4)
    free.push_cached(ids(2))
    free.push_plain(ids(4))
    assert free.take(2).tolist() == [4, 2]


def test_plain_pages_are_last_in_first_out_and_cached_ones_first_in_first_out():
    free = FreeList(7)
    free.take(6)
    free.push_cached(ids(6, 5))
    free.push_plain(ids(1, 2))
    free.push_cached(ids(3))
    assert free.take(5).tolist() == [2, 1, 6, 5, 3]


def test_a_cached_page_used_again_moves_to_the_end():
    free = FreeList(4)
    free.take(3)
    free.push_cached(ids(1, 2, 3))
    free.remove_cached(ids(1))
    assert len(free) == 2
    free.push_cached(ids(1))
    assert free.take(3).tolist() == [2, 3, 1]


def test_what_was_taken_is_not_changed_by_later_calls():
    free = FreeList(4)
    taken = free.take(2)
    free.push_plain(ids(2, 1))
    assert taken.tolist() == [1, 2]


def test_taking_more_than_is_free_is_a_broken_invariant():
    with pytest.raises(AssertionError, match="more blocks than are free"):
        FreeList(3).take(3)


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 12), st.lists(st.tuples(st.sampled_from("tpcr"), st.integers(0, 8)), max_size=120))
def test_it_behaves_like_two_plain_lists(num_blocks, actions):
    free = FreeList(num_blocks)
    stack, log, used = list(range(num_blocks - 1, 0, -1)), [], []
    for action, size in actions:
        if action == "t":
            count = min(size, len(stack) + len(log))
            expected = [stack.pop() if stack else log.pop(0) for _ in range(count)]
            assert free.take(count).tolist() == expected
            used += expected
        elif action == "r":
            back, log = log[::2][:size], [block for block in log if block not in log[::2][:size]]
            free.remove_cached(np.array(back, dtype=np.int32))
            used += back
        else:
            blocks, used = used[:size], used[size:]
            (free.push_plain if action == "p" else free.push_cached)(np.array(blocks, dtype=np.int32))
            (stack if action == "p" else log).extend(blocks)
        assert len(free) == len(stack) + len(log)


def test_a_thousand_uses_of_the_same_cached_pages_fit_in_the_log():
    free = FreeList(6)
    free.take(5)
    free.push_cached(ids(1, 2, 3, 4, 5))
    for _ in range(1000):
        free.remove_cached(ids(2, 4))
        free.push_cached(ids(4, 2))
    assert free.take(5).tolist() == [1, 3, 5, 4, 2]
