from __future__ import annotations

import numpy as np
import pytest

from quire.kv_cache.block_pool import NULL_BLOCK_ID, BlockPool
from tests.unit.kv_cache.test_prefix_index import find as find_sequence
from tests.unit.kv_cache.test_prefix_index import publish as publish_sequence

TOKENS = np.arange(8, dtype=np.int32)


def publish(pool: BlockPool, block_ids: np.ndarray) -> None:
    """Publish blocks as the leading blocks of TOKENS."""
    publish_sequence(pool.prefix_index, block_ids.tolist(), TOKENS)


def find(pool: BlockPool) -> np.ndarray:
    return find_sequence(pool.prefix_index, TOKENS)


def test_the_null_page_is_never_given_out():
    pool = BlockPool(6)
    assert NULL_BLOCK_ID not in pool.take(5).tolist()
    assert pool.num_free_blocks == 0 and pool.usage == 1.0


def test_free_and_used_make_the_total():
    pool = BlockPool(6)
    taken = pool.take(2)
    assert (pool.num_free_blocks, pool.usage) == (3, 0.4)
    pool.free(taken)
    assert (pool.num_free_blocks, pool.usage) == (5, 0.0)


def test_a_page_freed_twice_is_a_broken_invariant():
    pool = BlockPool(6)
    taken = pool.take(1)
    pool.free(taken)
    with pytest.raises(AssertionError, match="freed more often"):
        pool.free(taken)


def test_a_shared_page_is_free_when_its_last_user_leaves():
    pool = BlockPool(6)
    blocks = pool.take(2)
    publish(pool, blocks)
    pool.share(blocks)
    pool.free(blocks)
    assert pool.num_free_blocks == 3
    pool.free(blocks)
    assert pool.num_free_blocks == 5


def test_a_free_cached_page_is_found_and_taken_back_into_use():
    pool = BlockPool(6)
    blocks = pool.take(2)
    publish(pool, blocks)
    pool.free(blocks)
    found = find(pool)
    assert found.tolist() == blocks.tolist()
    assert pool.num_free_among(found) == 2
    pool.share(found)
    assert pool.num_free_among(found) == 0
    assert pool.num_free_blocks == 3


def test_a_cached_page_is_forgotten_only_when_it_is_taken():
    pool = BlockPool(4)
    blocks = pool.take(2)
    publish(pool, blocks)
    pool.free(blocks)
    pool.take(1)
    assert pool.num_cached_blocks == 2
    pool.take(1)
    assert find(pool).tolist() == [blocks[0]]


def test_the_tail_of_a_request_is_evicted_first():
    pool = BlockPool(5)
    blocks = pool.take(4)
    publish(pool, blocks)
    pool.free(blocks)
    assert pool.take(4).tolist() == blocks[::-1].tolist()


def test_the_least_recently_used_page_is_evicted_first():
    pool = BlockPool(4)
    blocks = pool.take(3)
    publish(pool, blocks)
    pool.free(blocks)
    pool.share(blocks[2:])
    pool.free(blocks[2:])
    assert pool.take(3).tolist() == [blocks[1], blocks[0], blocks[2]]


def test_reset_forgets_the_cache_only_when_no_page_is_in_use():
    pool = BlockPool(4)
    blocks = pool.take(1)
    publish(pool, blocks)
    assert not pool.reset_prefix_cache()
    assert pool.num_cached_blocks == 1
    pool.free(blocks)
    assert pool.reset_prefix_cache()
    assert pool.num_cached_blocks == 0
    assert sorted(pool.take(3).tolist()) == [1, 2, 3]
