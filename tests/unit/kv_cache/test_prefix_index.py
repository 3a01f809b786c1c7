from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from quire.core.cache_info import MissReason
from quire.core.request import ExtraKeys
from quire.kv_cache.block_hash import bytes_by_block, hash_full_blocks
from quire.kv_cache.prefix_index import PrefixIndex
from quire.kv_cache.prefix_tree import ROOT, PrefixTree

SALT: ExtraKeys = (("cache_salt", "s"),)
Keys = Mapping[int, ExtraKeys] | None


def pages_of(token_ids: Iterable[int]) -> list[bytes]:
    """Tokens by blocks of two."""
    tokens = np.array(list(token_ids), dtype=np.int32)
    return bytes_by_block(tokens[: len(tokens) // 2 * 2].reshape(-1, 2))


def publish(
    index: PrefixIndex, block_ids: list[int], token_ids: Iterable[int], keys: Keys = None, group: int = 0
) -> None:
    """Publish blocks as the leading ones of a sequence, as a row does that then ends."""
    nodes, node = [], ROOT
    for block, tokens in enumerate(pages_of(token_ids)[: len(block_ids)]):
        nodes.append(node := index.tree.advance(node, tokens, (keys or {}).get(block, ())))
    index.publish(group, nodes, np.array(block_ids, dtype=np.int32))
    index.tree.release(node)


def find(index: PrefixIndex, token_ids: Iterable[int], keys: Keys = None, group: int = 0) -> np.ndarray:
    """Leading blocks of a sequence that are cached in a group, up to the first that is not."""
    blocks = pages_of(token_ids)
    found = [index.blocks[group].get(node, -1) for node in index.tree.walk(blocks, keys or {}, len(blocks))]
    return np.array(found[: found.index(-1)] if -1 in found else found, dtype=np.int32)


def test_the_longest_published_prefix_is_found():
    index = PrefixIndex(8)
    publish(index, [4, 2], [1, 2, 3, 4, 5, 6])
    assert find(index, [1, 2, 3, 4, 5, 6]).tolist() == [4, 2]
    assert find(index, [1, 2]).tolist() == [4]
    assert find(index, [1, 2, 9, 9]).tolist() == [4]


def test_the_first_of_two_equal_pages_is_kept():
    index = PrefixIndex(8)
    publish(index, [1, 2], [1, 2, 3, 4])
    publish(index, [5, 6], [1, 2, 3, 4])
    assert find(index, [1, 2, 3, 4]).tolist() == [1, 2]
    assert np.flatnonzero(index.is_cached).tolist() == [1, 2]


def test_a_page_published_after_an_equal_one_continues_the_same_prefix():
    index = PrefixIndex(8)
    publish(index, [1], [1, 2, 3, 4])
    publish(index, [5, 6], [1, 2, 3, 4])
    assert find(index, [1, 2, 3, 4]).tolist() == [1, 6]


def test_a_forgotten_page_ends_the_prefix_and_takes_what_follows_it_along():
    index = PrefixIndex(8)
    tokens = [1, 2, 3, 4, 5, 6]
    publish(index, [1, 2, 3], tokens)
    index.forget(np.array([2, 3]))
    assert find(index, tokens).tolist() == [1]
    assert len(index) == 1 and np.flatnonzero(index.is_cached).tolist() == [1]
    publish(index, [4, 5, 6], tokens)
    assert find(index, tokens).tolist() == [1, 5, 6]


def test_pages_behind_other_extra_keys_go_with_the_page_before_them():
    index = PrefixIndex(8)
    publish(index, [1, 2], [1, 2, 3, 4])
    publish(index, [3, 4], [1, 2, 3, 4], {1: SALT})
    index.forget(np.array([1]))
    assert not index.is_cached.any()


def test_nothing_is_stored_after_a_page_that_cannot_be_found():
    index = PrefixIndex(8)
    publish(index, [1], [1, 2])
    nodes = [index.tree.enter(pages_of([1, 2, 3, 4, 5, 6]), {}, num_blocks) for num_blocks in (2, 3)]
    index.forget(np.array([1]))
    index.publish(0, nodes, np.array([2, 3]))
    assert len(index) == 0 and not index.is_cached.any()


def test_equal_tokens_behind_different_prefixes_are_different_pages():
    index = PrefixIndex(8)
    publish(index, [1, 2], [1, 2, 9, 9])
    publish(index, [3], [3, 4, 9, 9])
    assert find(index, [3, 4, 9, 9]).tolist() == [3]


def test_equal_tokens_with_different_extra_keys_are_different_pages():
    index = PrefixIndex(8)
    publish(index, [1], [1, 2], {0: SALT})
    assert find(index, [1, 2]).tolist() == []
    assert find(index, [1, 2], {0: SALT}).tolist() == [1]


def test_groups_have_pages_of_their_own_for_the_same_prefix():
    index = PrefixIndex(8, is_whole=(True, False))
    tokens = [1, 2, 3, 4, 5, 6]
    publish(index, [1, 2, 3], tokens)
    publish(index, [4, 5, 6], tokens, group=1)
    assert len(index.tree) == 3 and len(index) == 6
    index.forget(np.array([2, 5]))
    assert np.flatnonzero(index.is_cached).tolist() == [1, 4, 6], "where pages serve alone, others stay"


def test_a_prefix_is_remembered_for_as_long_as_its_pages_and_why_they_are_gone():
    index = PrefixIndex(4)  # eight are remembered
    publish(index, [1, 2], [1, 2, 3, 4])
    nodes = index.tree.walk(pages_of([1, 2, 3, 4]), {}, 2)
    index.forget(np.array([1, 2]))
    assert [index.past.reason(node) for node in nodes] == [MissReason.EVICTED] * 2
    for first in range(10, 18):
        publish(index, [3], [first, 0])
        index.forget(np.array([3]))
    assert [index.past.reason(node) for node in nodes] == [None] * 2
    assert len(index.tree) == len(index.past) == 8


def test_clearing_forgets_all_but_what_was_there():
    index = PrefixIndex(4)
    publish(index, [1, 2], [1, 2, 3, 4])
    index.clear()
    assert len(index) == len(index.tree) == 0 and not index.is_cached.any()
    assert index.tree.was_known_before_reset(pages_of([1, 2, 3, 4]), {}, 2)
    assert not index.tree.was_known_before_reset(pages_of([1, 2, 9, 9]), {}, 2)
    assert not index.tree.was_known_before_reset(pages_of([1, 2]), {0: SALT}, 1)


def test_names_for_other_programs_depend_on_content_alone():
    tokens, keys = np.arange(8, dtype=np.int32), {1: SALT}
    names = hash_full_blocks(tokens, 2, keys)
    for order in ([0, 1, 2, 3], [3, 1, 0, 2], [2, 3]):
        tree = PrefixTree()
        tree.enter(pages_of(range(40, 50)), {}, 5)
        last = tree.enter(pages_of(tokens), keys, 4)
        nodes = tree.walk(pages_of(tokens), keys, 4)
        assert nodes[-1] == last
        assert [tree.hash_of(nodes[block]) for block in order] == [names[block] for block in order]


def test_a_page_with_extra_keys_is_known_by_its_content_for_as_long_as_its_prefix():
    tree, content = PrefixTree(), pages_of([1, 2])[0]
    salts: list[ExtraKeys] = [(("cache_salt", name),) for name in "abc"]
    nodes = [tree.enter([content], {0: salt}, 1) for salt in salts]
    assert tree.salted.keys_of(ROOT, content, 9) == salts[::-1], "the newest first"
    assert tree.salted.keys_of(ROOT, content, 2) == [salts[2], salts[1]]
    tree.release(nodes[2])
    assert tree.salted.keys_of(ROOT, content, 2) == [salts[1], salts[0]]
    assert tree.salted.keys_of(ROOT, content[::-1], 2) == tree.salted.keys_of(5, content, 2) == []
    for node in nodes[:2]:
        tree.release(node)
    assert not tree.salted._keys and len(tree) == 0
