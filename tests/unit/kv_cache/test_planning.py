from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.config.cache import CacheConfig
from quire.core.kv_spec import AttentionSpec
from quire.errors import NotEnoughMemoryError, UnsupportedError
from quire.kv_cache.planning import max_model_len_that_fits, min_num_blocks, plan_kv_cache

PAGE_BYTES = 2 * 16 * 2 * 64 * 2


def specs(num_layers: int = 3, **changes: object) -> dict[str, AttentionSpec]:
    fields = {"block_size": 16, "num_kv_heads": 2, "head_size": 64, "dtype_bytes": 2, **changes}
    return {f"layers.{i}": AttentionSpec(**fields) for i in range(num_layers)}  # type: ignore[arg-type]


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
        "max_model_len=131072 needs 192.0 MiB of KV cache, 240.0 KiB is free for it\n"
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


def test_layers_that_differ_only_in_their_window_share_pages():
    mixed = {**specs(1, sliding_window=8), "last": specs(1)["layers.0"]}
    group = plan_kv_cache(mixed, 10**6, CacheConfig(), max_model_len=64).groups[0]
    assert group.spec.sliding_window is None
    assert plan_kv_cache(specs(2, sliding_window=8), 10**6, CacheConfig(), 64).groups[0].spec.sliding_window == 8


def test_layers_of_different_page_shape_are_refused_by_name():
    mixed = {**specs(1), "odd": specs(1, head_size=32)["layers.0"]}
    with pytest.raises(UnsupportedError, match=r"'layers\.0' and 'odd'"):
        plan_kv_cache(mixed, 10**6, CacheConfig(), max_model_len=64)


def test_a_model_without_attention_is_refused():
    with pytest.raises(UnsupportedError, match="no attention layer"):
        plan_kv_cache({}, 10**6, CacheConfig(), max_model_len=64)


@settings(max_examples=100, deadline=None)
@given(st.integers(2, 1000), st.integers(1, 64))
def test_the_longest_length_and_the_fewest_pages_are_inverse(num_blocks, block_size):
    longest = max_model_len_that_fits(num_blocks, block_size)
    assert min_num_blocks(longest, block_size) == num_blocks
    assert min_num_blocks(longest + 1, block_size) == num_blocks + 1
