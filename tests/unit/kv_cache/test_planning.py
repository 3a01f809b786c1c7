from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.config.cache import CacheConfig
from quire.core.kv_spec import FullAttentionSpec, KVCacheSpec, MambaSpec, SlidingWindowSpec
from quire.errors import NotEnoughMemoryError, UnsupportedError
from quire.kv_cache.block_counts import longest_sequence
from quire.kv_cache.planning import (
    concurrency,
    longest_that_fits,
    min_num_blocks,
    one_request_fits,
    plan_kv_cache,
)
from quire.kv_cache.pool_sizes import PlannedRequests, useful_bytes

PAGE_BYTES = 2 * 16 * 2 * 64 * 2


@pytest.fixture
def quire_log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Callable[[], str]:
    monkeypatch.setattr(logging.getLogger("quire"), "propagate", True)
    caplog.set_level("INFO", logger="quire")
    return lambda: caplog.text


def specs(num_layers: int = 3, **changes: int) -> dict[str, KVCacheSpec]:
    fields = {"block_size": 16, "num_kv_heads": 2, "head_size": 64, "dtype_bytes": 2, **changes}
    kind = SlidingWindowSpec if "sliding_window" in changes else FullAttentionSpec
    return {f"layers.{i}": kind(**fields) for i in range(num_layers)}


def test_memory_is_divided_into_pages_of_all_layers():
    config = plan_kv_cache(specs(), 10 * 3 * PAGE_BYTES + 5, CacheConfig(), max_model_len=64)
    assert config.num_blocks == 10
    assert config.block_size == 16
    assert config.groups[0].layer_names == ("layers.0", "layers.1", "layers.2")
    assert config.groups[0].page_size_bytes == 3 * PAGE_BYTES


def test_a_number_of_pages_overrides_every_budget():
    config = plan_kv_cache(specs(), 0, CacheConfig(num_blocks=7, kv_cache_memory_bytes=1), max_model_len=10**6)
    assert config.num_blocks == 7


def test_bytes_given_by_the_user_override_what_is_available():
    cache = CacheConfig(kv_cache_memory_bytes=20 * 3 * PAGE_BYTES)
    assert plan_kv_cache(specs(), 1, cache, max_model_len=64).num_blocks == 20


def test_too_little_memory_names_the_numbers_and_the_longest_length_that_fits():
    with pytest.raises(NotEnoughMemoryError) as refused:
        plan_kv_cache(specs(), 10 * 3 * PAGE_BYTES, CacheConfig(memory_utilization=0.85), max_model_len=131072)
    assert str(refused.value) == (
        "max_model_len=131072 needs 192.0 MiB of KV cache, 240.0 KiB is available\n"
        "hint: use max_model_len <= 145, or raise gpu_memory_utilization (now 0.85), or free memory"
    )
    assert refused.value.field == "max_model_len"


def test_the_longest_length_that_is_named_does_fit():
    budget = 10 * 3 * PAGE_BYTES
    assert plan_kv_cache(specs(), budget, CacheConfig(), max_model_len=145).num_blocks == 10
    with pytest.raises(NotEnoughMemoryError):
        plan_kv_cache(specs(), budget, CacheConfig(), max_model_len=146)


def test_too_few_bytes_given_by_the_user_names_how_many_are_needed():
    cache = CacheConfig(kv_cache_memory_bytes=PAGE_BYTES)
    with pytest.raises(NotEnoughMemoryError, match=r"hint: raise kv_cache_memory_bytes to at least 122880$"):
        plan_kv_cache(specs(), 10**9, cache, max_model_len=64)


def test_negative_memory_is_too_little_memory():
    with pytest.raises(NotEnoughMemoryError):
        plan_kv_cache(specs(), -(10**9), CacheConfig(), max_model_len=64)


def test_layers_that_differ_only_in_their_window_share_pages_where_none_is_freed():
    mixed = {**specs(1, sliding_window=8), "last": specs(1)["layers.0"]}
    (group,) = plan_kv_cache(mixed, 10**6, CacheConfig(disable_hybrid_kv_cache_manager=True), max_model_len=64).groups
    assert isinstance(group.spec, FullAttentionSpec)
    assert (
        plan_kv_cache(specs(2, sliding_window=8), 10**6, CacheConfig(), 64).groups[0].spec
        == specs(1, sliding_window=8)["layers.0"]
    )


def test_layers_of_different_page_shape_have_pools_of_their_own(quire_log):
    wide, narrow = specs(3), specs(1, head_size=32)["layers.0"]
    config = plan_kv_cache({**wide, "odd": narrow}, 10**6, CacheConfig(), max_model_len=64)
    assert [(group.layer_names, group.pool) for group in config.groups] == [(tuple(wide), 0), (("odd",), 1)]
    assert config.first_block_ids() == (0, config.pools[0].num_blocks)
    assert 10**6 - 10 * PAGE_BYTES < config.total_bytes <= 10**6
    sizes = [pool.num_blocks for pool in config.pools]
    assert abs(sizes[0] - sizes[1]) <= 1 and sum(sizes) == config.num_blocks  # both keep all blocks of a request


def test_a_pool_of_windows_gets_what_requests_of_a_middling_length_hold():
    full, windowed = specs(4), specs(1, head_size=32, sliding_window=33)["layers.0"]
    layers = {**full, **{f"local{i}": windowed for i in range(20)}}
    config = plan_kv_cache(layers, 10**7, CacheConfig(), max_model_len=640, max_chunk_tokens=16)
    assert [type(group.spec).__name__ for group in config.groups] == ["FullAttentionSpec", "SlidingWindowSpec"]
    whole, local = (pool.num_blocks - 1 for pool in config.pools)
    # 10 blocks of 160 tokens beside 4 behind the window and in a chunk; at first one request of 640 tokens.
    assert (whole - 40) // 10 == (local - 4) // 4 and config.total_bytes <= 10**7


@given(num_pages=st.integers(0, 60), length=st.integers(1, 200), has_blocks=st.booleans())
def test_the_longest_length_is_the_last_that_is_planned(num_pages, length, has_blocks):
    cache = CacheConfig(num_blocks=num_pages + 2 if has_blocks else None)
    requests = PlannedRequests(length, min(length, 32))
    longest = longest_that_fits(specs(2), num_pages * PAGE_BYTES, cache, requests)
    assert not longest or one_request_fits(specs(2), num_pages * PAGE_BYTES, cache, requests.of_length(longest))
    more = replace(requests, max_model_len=longest + 1)
    assert longest == length or not one_request_fits(specs(2), num_pages * PAGE_BYTES, cache, more)


def test_layers_of_two_shapes_that_do_not_fit_name_the_longest_length():
    layers = {**specs(3), "odd": specs(1, head_size=32)["layers.0"]}
    with pytest.raises(NotEnoughMemoryError) as caught:
        plan_kv_cache(layers, 30 * PAGE_BYTES, CacheConfig(), max_model_len=640)
    longest = int(re.search(r"max_model_len <= (\d+)", str(caught.value))[1])
    assert plan_kv_cache(layers, 30 * PAGE_BYTES, CacheConfig(), longest).total_bytes <= 30 * PAGE_BYTES
    with pytest.raises(NotEnoughMemoryError):
        plan_kv_cache(layers, 30 * PAGE_BYTES, CacheConfig(), longest + 1)


def test_a_model_without_layers_is_refused():
    with pytest.raises(UnsupportedError, match="does not have layers with a cache"):
        plan_kv_cache({}, 10**6, CacheConfig(), max_model_len=64)


def hybrid(num_full: int, num_states: int) -> dict[str, KVCacheSpec]:
    state = MambaSpec(block_size=16, shapes=((100, 7),), dtype_bytes=(4,))
    return {**specs(num_full), **{f"s{i}": state for i in range(num_states)}}


def test_states_have_two_blocks_for_each_request_and_those_for_checkpoints():
    for checkpoints, num_blocks in ((None, 1 + 3 * 5), (0, 1 + 2 * 5), (7, 1 + 2 * 5 + 7)):
        cache = CacheConfig(num_state_checkpoints=checkpoints)
        assert (
            plan_kv_cache(hybrid(0, 1), 10**7, CacheConfig(enable_prefix_caching=False), 640, max_num_seqs=5).num_blocks
            == 6
        )
        config = plan_kv_cache(hybrid(2, 6), 10**7, cache, 640, max_num_seqs=5)
        assert [group.pool for group in config.groups] == [0, 1] and len(config.groups[1].layer_names) == 6
        assert config.pools[1].num_blocks == num_blocks
        state_bytes = 44 * 64  # 2,800 bytes, aligned
        assert config.pools[0].num_blocks == (10**7 - num_blocks * 6 * state_bytes) // (2 * PAGE_BYTES)
    for available, num_states in ((10**7, 16), (10**6, 16), (9 * 2 * PAGE_BYTES + 7 * 6 * state_bytes, 7), (0, 3)):
        config = plan_kv_cache(hybrid(2, 6), available, CacheConfig(num_blocks=9), 640, max_num_seqs=5)
        assert [pool.num_blocks for pool in config.pools] == [9, num_states]


def test_states_take_at_most_half_of_the_memory_beside_attention_but_what_one_request_needs():
    config = plan_kv_cache(hybrid(2, 6), 10**6, CacheConfig(), 64, max_num_seqs=500)
    state_bytes = 6 * 44 * 64
    assert 0.4 * 10**6 < config.pools[1].num_blocks * state_bytes <= 0.5 * 10**6
    assert config.pools[0].num_blocks * 2 * PAGE_BYTES > 0.45 * 10**6
    least = 3 * state_bytes + 5 * 2 * PAGE_BYTES
    config = plan_kv_cache(hybrid(2, 6), least, CacheConfig(), 65, max_num_seqs=500)
    assert [pool.num_blocks for pool in config.pools] == [5, 3]
    with pytest.raises(NotEnoughMemoryError, match="use max_model_len <= 49"):
        plan_kv_cache(hybrid(2, 6), least - 1, CacheConfig(), 65, max_num_seqs=500)


@pytest.mark.parametrize("num_drafts", [0, 4])
def test_all_that_is_of_use_has_room_for_every_state_and_every_block(num_drafts):
    layers, load = hybrid(1, 9), {"max_num_seqs": 8, "num_drafts": num_drafts}
    available = useful_bytes(layers, CacheConfig(block_size=16), 640, **load)
    config = plan_kv_cache(layers, available, CacheConfig(block_size=16), 640, **load)
    num_for_drafts = 16 if num_drafts else 0
    assert [pool.num_blocks for pool in config.pools] == [8 * 40 + 1, 1 + 3 * 8 + num_for_drafts]


def test_a_model_of_states_alone_has_one_pool_of_them():
    config = plan_kv_cache(hybrid(0, 3), 10**7, CacheConfig(), 10**6, max_num_seqs=8)
    assert (config.num_blocks, config.pools, config.block_size) == (25, (), 16)
    assert plan_kv_cache(hybrid(0, 3), 5 * 3 * 44 * 64, CacheConfig(), 10**6, max_num_seqs=8).num_blocks == 5


def test_the_swap_space_is_divided_as_the_cache_is():
    config = plan_kv_cache(hybrid(2, 6), 10**7, CacheConfig(swap_space=0.5), 640, max_num_seqs=5)
    sizes, page_bytes = config.pools, config.pool_page_bytes()
    shares = [size.num_blocks * one / config.total_bytes for size, one in zip(sizes, page_bytes, strict=True)]
    for size, one, share in zip(sizes, page_bytes, shares, strict=True):
        assert size.num_swap_blocks == int((1 << 29) * share) // one
    assert config.num_swap_blocks == sum(size.num_swap_blocks for size in sizes)


MOST = st.lists(st.one_of(st.none(), st.integers(1, 40)), min_size=1, max_size=4)


@settings(max_examples=100, deadline=None)
@given(st.integers(2, 1000), st.integers(1, 64), MOST)
def test_the_longest_length_and_the_fewest_pages_are_inverse(num_blocks, block_size, most):
    longest = longest_sequence(num_blocks - 1, most)
    if longest is None:
        assert min_num_blocks(10**9, block_size, most) <= num_blocks
        return
    if longest > 0:
        assert min_num_blocks(longest * block_size + 1, block_size, most) <= num_blocks
    assert min_num_blocks(longest * block_size + 2, block_size, most) > num_blocks
    if most == [None]:
        assert longest == num_blocks - 1


def mixed_specs(num_full: int, num_windowed: int, window: int = 32) -> dict[str, KVCacheSpec]:
    """Layers in turn, as far as there are enough of both."""
    full, windowed = specs(1)["layers.0"], specs(1, sliding_window=window)["layers.0"]
    kinds = [windowed] * num_windowed
    for i in range(num_full):
        kinds.insert(2 * i, full)
    return {f"layers.{i}": spec for i, spec in enumerate(kinds)}


def test_layers_of_different_windows_have_groups_of_equal_size_and_one_page_id_serves_each():
    config = plan_kv_cache(mixed_specs(2, 2), 100 * 2 * PAGE_BYTES, CacheConfig(), max_model_len=640)
    assert [group.layer_names for group in config.groups] == [("layers.0", "layers.2"), ("layers.1", "layers.3")]
    assert [group.spec.most_blocks(1) for group in config.groups] == [None, 3]
    assert config.num_blocks == 100 and config.page_size_bytes == 2 * PAGE_BYTES


def test_one_full_layer_in_six_makes_groups_of_its_number_of_layers():
    config = plan_kv_cache(mixed_specs(4, 20), 10**8, CacheConfig(), max_model_len=6400)
    assert [len(group.layer_names) for group in config.groups] == [4] * 6
    assert config.groups[0].spec == specs(1)["layers.0"]


def test_numbers_that_do_not_divide_are_padded_and_the_waste_is_said(quire_log):
    config = plan_kv_cache(mixed_specs(4, 22), 10**8, CacheConfig(), max_model_len=6400)
    assert sorted(len(group.layer_names) for group in config.groups) == [3, 3, 4, 4, 4, 4, 4]
    names = [name for group in config.groups for name in group.layer_names]
    assert sorted(names) == sorted(mixed_specs(4, 22))
    assert "7 groups of up to 4 layers (4 layers of full attention; 22 layers of a sliding window of 32 tokens)" in (
        quire_log()
    )
    assert "7% of the blocks' memory is padding" in quire_log()


@pytest.mark.parametrize(
    ("layers", "max_model_len", "disabled", "reason"),
    [
        (mixed_specs(2, 2), 32, False, "no layer has a window shorter than max_model_len"),
        (mixed_specs(2, 2), 640, True, "disable_hybrid_kv_cache_manager"),
        (mixed_specs(31, 1, 500), 640, False, "do not divide into groups that take less memory"),
        (mixed_specs(28, 4), 6400, False, "do not divide into groups that take less memory"),  # 24 of 56 unused
    ],
)
def test_one_group_of_masked_windows_says_why(layers, max_model_len, disabled, reason, quire_log):
    cache = CacheConfig(disable_hybrid_kv_cache_manager=disabled)
    (group,) = plan_kv_cache(layers, 10**9, cache, max_model_len).groups
    assert len(group.layer_names) == len(layers) and isinstance(group.spec, FullAttentionSpec)
    assert reason in quire_log()


def test_a_windowed_model_needs_memory_for_its_window_and_a_chunk_alone():
    windowed = specs(3, sliding_window=33)
    # 32 tokens before a chunk of 16 lie in 4 blocks at worst, and there is the null block.
    config = plan_kv_cache(windowed, 5 * 3 * PAGE_BYTES, CacheConfig(), max_model_len=10**6, max_chunk_tokens=16)
    assert config.num_blocks == 5
    with pytest.raises(NotEnoughMemoryError, match=r"use max_model_len <= 49, "):
        plan_kv_cache(windowed, 4 * 3 * PAGE_BYTES, CacheConfig(), max_model_len=10**6, max_chunk_tokens=16)
    assert plan_kv_cache(windowed, 4 * 3 * PAGE_BYTES, CacheConfig(), 49, max_chunk_tokens=16).num_blocks == 4


def test_padding_that_does_not_fit_falls_back_to_one_group(quire_log):
    layers, budget = mixed_specs(4, 3), 41 * 7 * PAGE_BYTES
    (group,) = plan_kv_cache(layers, budget, CacheConfig(), max_model_len=641).groups
    assert isinstance(group.spec, FullAttentionSpec)
    assert "several would need more memory than available" in quire_log()
    assert len(plan_kv_cache(layers, budget, CacheConfig(), 641, max_chunk_tokens=16).groups) == 2


@settings(max_examples=100, deadline=None)
@given(
    st.integers(0, 6), st.integers(1, 9), st.integers(1, 200), st.integers(1, 60), st.integers(2, 600),
    st.integers(1, 600), st.booleans(),
)  # fmt: skip
def test_the_longest_length_that_is_named_fits_whatever_the_windows(
    num_full, num_windowed, window, num_blocks, max_model_len, chunk, disabled
):
    layers = mixed_specs(num_full, num_windowed, window)
    cache = CacheConfig(disable_hybrid_kv_cache_manager=disabled)
    try:
        config = plan_kv_cache(layers, num_blocks * PAGE_BYTES, cache, max_model_len, chunk)
    except NotEnoughMemoryError as refused:
        found = re.search(r"max_model_len <= (\d+)", str(refused))
        if found is not None:
            assert int(found[1]) < max_model_len
            plan_kv_cache(layers, num_blocks * PAGE_BYTES, cache, int(found[1]), chunk)
        return
    assert config.num_blocks * config.page_size_bytes <= num_blocks * PAGE_BYTES
    assert sorted(name for group in config.groups for name in group.layer_names) == sorted(layers)
    assert concurrency(config, max_model_len, min(chunk, max_model_len)) > 0


def test_the_swap_space_holds_as_many_pages_as_fit_and_takes_nothing_from_the_cache():
    config = plan_kv_cache(specs(), 10 * 3 * PAGE_BYTES, CacheConfig(swap_space=0.5), max_model_len=64)
    assert (config.num_blocks, config.num_swap_blocks) == (10, (1 << 29) // (3 * PAGE_BYTES))
    assert plan_kv_cache(specs(), 0, CacheConfig(num_blocks=7), max_model_len=64).num_swap_blocks == 0


def test_a_swap_space_below_one_page_is_refused_with_the_size_that_holds_one():
    with pytest.raises(NotEnoughMemoryError, match="is less than one block of 24.0 KiB") as caught:
        plan_kv_cache(specs(), 0, CacheConfig(num_blocks=7, swap_space=1e-6), max_model_len=64)
    assert caught.value.hint == "use swap_space >= 0.001, or 0" and caught.value.field == "swap_space"


def test_the_number_of_blocks_of_the_first_pool_can_be_set_later():
    config = plan_kv_cache(hybrid(2, 6), 10**7, CacheConfig(), 640, max_num_seqs=5).with_num_blocks(50)
    assert (config.pools[0].num_blocks, config.pools[1].num_blocks, config.num_blocks) == (50, 16, 66)
    assert plan_kv_cache(specs(), 10**7, CacheConfig(), 64).with_num_blocks(9).num_blocks == 9
