from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.kv_cache.encoder_cache_manager import EncoderCache, EncoderCacheManager, MediaItem, NoEncoderCache

CAT, DOG, FILM = MediaItem("cat", 4), MediaItem("dog", 3), MediaItem("film", 9)


def test_an_item_is_encoded_once_for_all_who_show_it():
    cache = EncoderCacheManager(10)
    assert not cache.has(1, CAT)
    assert cache.can_allocate(CAT, num_left=10)
    cache.allocate(1, CAT)
    assert cache.has(2, CAT)
    assert cache.num_free_slots == 6


def test_an_item_stays_while_anybody_uses_it_and_afterwards_until_its_room_is_needed():
    cache = EncoderCacheManager(10)
    cache.allocate(1, CAT)
    assert cache.has(2, CAT)
    cache.free(1, "cat")
    assert not cache.can_allocate(FILM, num_left=10)
    cache.free(2, "cat")
    assert cache.num_free_slots == 10 and cache.has(3, CAT)
    cache.free_request(3)
    assert cache.can_allocate(FILM, num_left=10)
    cache.allocate(4, FILM)
    assert cache.take_freed() == ["cat"] and cache.take_freed() == []
    assert not cache.has(5, CAT)


def test_the_least_recently_used_goes_first():
    cache = EncoderCacheManager(10)
    for handle, item in enumerate((CAT, DOG)):
        cache.allocate(handle, item)
        cache.free_request(handle)
    assert cache.has(7, CAT)
    cache.free(7, "cat")
    cache.allocate(8, MediaItem("bird", 5))
    assert cache.take_freed() == ["dog"]


def test_a_step_encodes_no_more_than_its_budget():
    cache = EncoderCacheManager(10)
    assert not cache.can_allocate(FILM, num_left=8)
    assert cache.can_allocate(FILM, num_left=9)
    assert not cache.can_allocate(MediaItem("opera", 11), num_left=99)


def test_an_item_evicted_and_encoded_again_within_a_step_is_not_dropped():
    cache = EncoderCacheManager(10)
    cache.allocate(1, CAT)
    cache.free_request(1)
    cache.allocate(2, FILM)
    cache.free_request(2)
    cache.allocate(3, CAT)
    assert cache.take_freed() == ["film"]


def test_freeing_what_is_not_used_does_nothing():
    cache = EncoderCacheManager(10)
    cache.allocate(1, CAT)
    for _ in range(2):
        cache.free(1, "cat")
        cache.free(9, "cat")
        cache.free_request(1)
    assert cache.num_free_slots == 10


def test_a_model_without_an_encoder_keeps_nothing():
    cache: EncoderCache = NoEncoderCache()
    cache.free(1, "cat")
    cache.free_request(1)
    assert not cache.has(1, CAT) and not cache.can_allocate(CAT, 99) and not cache.take_freed()
    with pytest.raises(AssertionError):
        cache.allocate(1, CAT)


@settings(max_examples=200, deadline=None)
@given(
    st.integers(1, 20),
    st.lists(st.tuples(st.sampled_from("sfx"), st.integers(0, 3), st.integers(0, 7)), max_size=60),
)
def test_whatever_is_shown_room_and_users_are_right(num_slots, script):
    """The worker's memory, kept by hand: what was encoded and not dropped."""
    cache, kept, used = EncoderCacheManager(num_slots), {}, {}
    for kind, handle, number in script:
        item = MediaItem(str(number), 1 + number)
        if kind == "s":
            is_there = cache.has(handle, item)
            assert is_there == (item.content_hash in kept)
            if not is_there:
                if not cache.can_allocate(item, num_left=6):
                    assert item.num_embeddings > min(6, cache.num_free_slots)
                    continue
                cache.allocate(handle, item)
                for content_hash in cache.take_freed():
                    assert not used.get(content_hash), "an item in use was dropped"
                    del kept[content_hash]
                kept[item.content_hash] = item.num_embeddings
            used.setdefault(item.content_hash, set()).add(handle)
        elif kind == "f":
            cache.free(handle, item.content_hash)
            used.get(item.content_hash, set()).discard(handle)
        else:
            cache.free_request(handle)
            for users in used.values():
                users.discard(handle)
        assert sum(kept.values()) <= num_slots
        assert cache.num_free_slots == num_slots - sum(kept[name] for name, users in used.items() if users)
