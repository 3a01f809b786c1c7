from __future__ import annotations

import numpy as np

from quire.core.request import ExtraKeys
from quire.kv_cache.block_hash import hash_full_pages
from quire.kv_cache.prefix_index import ROOT_PREFIX_ID, PrefixIndex
from quire.kv_cache.token_pages import TokenPages

SALT: ExtraKeys = (("cache_salt", "s"),)


def publish(index: PrefixIndex, block_ids: list[int], token_ids: np.ndarray, hashes: list[bytes], keys=None) -> None:
    pages = token_ids[: 2 * len(block_ids)].reshape(-1, 2)
    index.write_tokens(np.array(block_ids), pages)
    parent = ROOT_PREFIX_ID
    for page, block_id in enumerate(block_ids):
        parent = index.publish(block_id, hashes[page], parent, (keys or {}).get(page, ()))


def sequence(*token_ids: int) -> tuple[np.ndarray, list[bytes]]:
    tokens = np.array(token_ids, dtype=np.int32)
    return tokens, hash_full_pages(tokens, 2, {})


def test_the_longest_published_prefix_is_found():
    index = PrefixIndex(8, 2)
    tokens, hashes = sequence(1, 2, 3, 4, 5, 6)
    publish(index, [4, 2], tokens, hashes)
    assert index.find(hashes, tokens, {}).tolist() == [4, 2]
    assert index.find(hashes[:1], tokens, {}).tolist() == [4]
    other, other_hashes = sequence(1, 2, 9, 9)
    assert index.find(other_hashes, other, {}).tolist() == [4]


def test_the_first_of_two_equal_pages_is_kept():
    index = PrefixIndex(8, 2)
    tokens, hashes = sequence(1, 2, 3, 4)
    publish(index, [1, 2], tokens, hashes)
    publish(index, [5, 6], tokens, hashes)
    assert index.find(hashes, tokens, {}).tolist() == [1, 2]
    assert np.flatnonzero(index.is_cached).tolist() == [1, 2]


def test_a_page_published_after_an_equal_one_continues_the_same_prefix():
    index = PrefixIndex(8, 2)
    tokens, hashes = sequence(1, 2, 3, 4)
    publish(index, [1], tokens, hashes)
    publish(index, [5, 6], tokens, hashes)
    assert index.find(hashes, tokens, {}).tolist() == [1, 6]


def test_a_forgotten_page_ends_the_prefix_and_takes_what_follows_it_along():
    index = PrefixIndex(8, 2)
    tokens, hashes = sequence(1, 2, 3, 4, 5, 6)
    publish(index, [1, 2, 3], tokens, hashes)
    index.forget([2, 3])
    assert index.find(hashes, tokens, {}).tolist() == [1]
    assert len(index) == 1 and np.flatnonzero(index.is_cached).tolist() == [1]


def test_nothing_is_stored_after_a_page_that_cannot_be_found():
    index = PrefixIndex(8, 2)
    tokens, hashes = sequence(1, 2, 3, 4, 5, 6)
    publish(index, [1], tokens, hashes)
    parent = index.prefix_id(np.array([1]))
    index.forget([1])
    for page in (1, 2):
        parent = index.publish(page + 1, hashes[page], parent, ())
    assert len(index) == 0 and not index.is_cached.any()


def test_equal_hashes_of_different_tokens_are_a_miss():
    index = PrefixIndex(8, 2)
    tokens, _ = sequence(1, 2)
    other, _ = sequence(3, 4)
    publish(index, [1], tokens, [b"same"])
    assert index.find([b"same"], other, {}).tolist() == []
    assert index.find([b"same"], tokens, {}).tolist() == [1]


def test_equal_hashes_and_tokens_behind_different_prefixes_are_a_miss():
    index = PrefixIndex(8, 2)
    tokens, _ = sequence(1, 2, 9, 9)
    other, _ = sequence(3, 4, 9, 9)
    publish(index, [1, 2], tokens, [b"first", b"same"])
    publish(index, [3], other, [b"other"])
    assert index.find([b"other", b"same"], other, {}).tolist() == [3]


def test_equal_hashes_and_tokens_with_different_extra_keys_are_a_miss():
    index = PrefixIndex(8, 2)
    tokens, _ = sequence(1, 2)
    publish(index, [1], tokens, [b"same"], {0: SALT})
    assert index.find([b"same"], tokens, {}).tolist() == []
    assert index.find([b"same"], tokens, {0: SALT}).tolist() == [1]


def test_of_colliding_pages_the_newest_is_kept():
    index = PrefixIndex(8, 2)
    tokens, _ = sequence(1, 2)
    other, _ = sequence(3, 4)
    publish(index, [1], tokens, [b"same"])
    publish(index, [2], other, [b"same"])
    assert index.find([b"same"], other, {}).tolist() == [2]
    assert not index.is_cached[1]


def test_a_page_whose_parent_was_evicted_and_computed_again_is_replaced():
    index = PrefixIndex(8, 2)
    tokens, hashes = sequence(1, 2, 3, 4)
    publish(index, [1, 2], tokens, hashes)
    index.forget([1])
    publish(index, [3, 4], tokens, hashes)
    assert index.find(hashes, tokens, {}).tolist() == [3, 4]
    assert np.flatnonzero(index.is_cached).tolist() == [3, 4]


def test_token_pages_count_leading_pages_that_match():
    pages = TokenPages(4, 2)
    pages.write(np.array([1, 3]), np.array([[1, 2], [3, 4]]))
    assert pages.num_matching(np.array([1, 3]), np.array([1, 2, 3, 4, 5])) == 2
    assert pages.num_matching(np.array([1, 3]), np.array([1, 2, 3, 5])) == 1
    assert pages.num_matching(np.array([1, 3]), np.array([0, 2, 3, 4])) == 0


def test_token_pages_count_leading_tokens_that_are_equal():
    pages = TokenPages(6, 3)
    pages.write(np.array([1, 2, 3, 4, 5]), np.array([[1, 2, 3], [1, 2, 9], [1, 9, 3], [9, 2, 3], [9, 9, 9]]))
    found = pages.num_equal(np.array([5, 4, 3, 2, 1]), np.array([1, 2, 3], dtype=np.int32))
    assert found.tolist() == [0, 0, 1, 2, 3]


def test_a_page_with_extra_keys_is_known_by_its_content_until_it_is_forgotten():
    index, tokens = PrefixIndex(9, 2), np.array([[1, 2]] * 3, dtype=np.int32)
    index.write_tokens(np.array([1, 2, 3]), tokens)
    salts: list[ExtraKeys] = [(("cache_salt", name),) for name in "abc"]
    for block_id, salt in enumerate(salts, 1):
        index.publish(block_id, hash_full_pages(tokens[0], 2, {0: salt})[0], ROOT_PREFIX_ID, salt)
    content = tokens[0].tobytes()
    assert index.salted.keys_of(ROOT_PREFIX_ID, content, 9) == salts[::-1], "the newest first"
    assert index.salted.keys_of(ROOT_PREFIX_ID, content, 2) == [salts[2], salts[1]]
    index.forget([3])
    assert index.salted.keys_of(ROOT_PREFIX_ID, content, 2) == [salts[1], salts[0]]
    assert index.salted.keys_of(ROOT_PREFIX_ID, content[::-1], 2) == index.salted.keys_of(5, content, 2) == []
    index.forget([1, 2])
    assert not index.salted._keys
