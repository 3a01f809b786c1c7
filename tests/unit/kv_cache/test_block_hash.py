from __future__ import annotations

import hashlib

import numpy as np

from quire.kv_cache.block_hash import ROOT_HASH, bytes_by_block, hash_full_blocks, sha256_block_hash, token_bytes


def tokens(*token_ids: int) -> np.ndarray:
    return np.array(token_ids, dtype=np.int32)


def test_only_full_pages_have_a_hash():
    assert [len(hash_full_blocks(np.arange(n, dtype=np.int32), 4, {})) for n in (0, 3, 4, 7, 8)] == [0, 0, 1, 1, 2]


def test_the_hash_is_sha256_over_parent_and_little_endian_tokens():
    first, second = hash_full_blocks(tokens(1, 2, 3, 4), 2, {})
    assert first == hashlib.sha256(ROOT_HASH + bytes([1, 0, 0, 0, 2, 0, 0, 0])).digest()
    assert second == hashlib.sha256(first + bytes([3, 0, 0, 0, 4, 0, 0, 0])).digest()


def test_a_page_is_named_by_all_tokens_before_it():
    assert hash_full_blocks(tokens(1, 2, 9, 9), 2, {})[1] != hash_full_blocks(tokens(1, 3, 9, 9), 2, {})[1]
    assert hash_full_blocks(tokens(1, 2, 9, 9), 2, {})[0] == hash_full_blocks(tokens(1, 2, 8, 8), 2, {})[0]


def test_extra_keys_of_the_first_page_change_every_page():
    plain = hash_full_blocks(tokens(1, 2, 3, 4), 2, {})
    salted = hash_full_blocks(tokens(1, 2, 3, 4), 2, {0: (("cache_salt", "a"),)})
    other = hash_full_blocks(tokens(1, 2, 3, 4), 2, {0: (("cache_salt", "b"),)})
    assert len({*plain, *salted, *other}) == 6


def test_extra_keys_with_the_same_letters_in_other_places_differ():
    keys = [(("a", "bc"),), (("ab", "c"),), (("a", "b"), ("c", "")), (("a", "b', 'c"),)]
    assert len({sha256_block_hash(ROOT_HASH, b"", key) for key in keys}) == len(keys)


def test_a_strided_or_wider_array_hashes_like_its_values():
    values = np.arange(16, dtype=np.int64)
    assert hash_full_blocks(values[::2], 4, {}) == hash_full_blocks(values[::2].astype(np.int32), 4, {})


def test_pages_of_an_array_are_hashed_as_each_of_them_is():
    blocks = np.arange(24, dtype=np.int32).reshape(6, 4)
    for array in (blocks, blocks[::2], blocks.astype(np.int64)):
        assert bytes_by_block(array) == [token_bytes(block) for block in array]
