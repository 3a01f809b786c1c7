"""How the memory for the KV cache is divided into pages.

Called by the engine between loading the model and starting the scheduler. Pure functions.
"""

from __future__ import annotations

import dataclasses
import math

from quire.config.cache import CacheConfig
from quire.core.kv_spec import AttentionSpec, KVCacheConfig, KVCacheGroupSpec
from quire.errors import NotEnoughMemoryError, UnsupportedError
from quire.utils.memory import GIB, format_bytes


def plan_kv_cache(
    specs: dict[str, AttentionSpec], available_bytes: int, cache: CacheConfig, max_model_len: int
) -> KVCacheConfig:
    """Divide the KV cache into pages.

    `cache.num_blocks` decides when it is set; requests longer than that many pages are then refused one by one.
    Otherwise `cache.kv_cache_memory_bytes`, or `available_bytes`, must hold one request of `max_model_len` tokens.

    Args:
        specs: layer name -> what it needs; layers must agree on the shape of a page.
        available_bytes: what the executor can spare.
        cache: the settings.
        max_model_len: longest request, in tokens.

    Raises:
        NotEnoughMemoryError: it does not fit; names the numbers and the longest `max_model_len` that does.
        UnsupportedError: layers differ in the shape of a page, or there are none.
    """
    group = _make_group(specs)
    num_swap_blocks = _num_swap_blocks(cache.swap_space, group.page_size_bytes)
    if cache.num_blocks is not None:
        return KVCacheConfig(num_blocks=cache.num_blocks, groups=(group,), num_swap_blocks=num_swap_blocks)
    budget_bytes = available_bytes if cache.kv_cache_memory_bytes is None else cache.kv_cache_memory_bytes
    num_blocks = max(0, budget_bytes) // group.page_size_bytes
    if num_blocks < min_num_blocks(max_model_len, group.spec.block_size):
        raise _not_enough_memory(group, budget_bytes, cache, max_model_len)
    return KVCacheConfig(num_blocks=num_blocks, groups=(group,), num_swap_blocks=num_swap_blocks)


def min_num_blocks(max_model_len: int, block_size: int) -> int:
    """Pages that one request of `max_model_len` tokens needs, the null page included.

    The last token is sampled and never written, so `max_model_len - 1` tokens are stored.
    """
    return -(-max(1, max_model_len - 1) // block_size) + 1


def max_model_len_that_fits(num_blocks: int, block_size: int) -> int:
    """The longest request that runs alone in `num_blocks` pages, the null page included; 0 when none does."""
    return (num_blocks - 1) * block_size + 1 if num_blocks > 1 else 0


def _make_group(specs: dict[str, AttentionSpec]) -> KVCacheGroupSpec:
    """All layers as one group: pages are kept for the whole sequence, so windows may differ between layers."""
    if not specs:
        raise UnsupportedError("the model has no attention layer, so there is nothing to cache", field="model")
    first_name, first = next(iter(specs.items()))
    shape = dataclasses.replace(first, sliding_window=None)
    for name, spec in specs.items():
        if dataclasses.replace(spec, sliding_window=None) != shape:
            raise UnsupportedError(
                f"layers {first_name!r} and {name!r} need KV cache pages of different shape: {first} and {spec}",
                hint="one shape for all layers is supported",
                field="model",
            )
    windows = {spec.sliding_window for spec in specs.values()}
    return KVCacheGroupSpec(layer_names=tuple(specs), spec=first if len(windows) == 1 else shape)


def _num_swap_blocks(swap_space: float, page_size_bytes: int) -> int:
    """Pages in so many GiB."""
    num_blocks = int(swap_space * GIB) // page_size_bytes
    if swap_space and not num_blocks:
        raise NotEnoughMemoryError(
            f"swap_space={swap_space:g} GiB holds no page of {format_bytes(page_size_bytes)}",
            hint=f"use swap_space >= {math.ceil(1000 * page_size_bytes / GIB) / 1000:g}, or 0",
            field="swap_space",
        )
    return num_blocks


def _not_enough_memory(
    group: KVCacheGroupSpec, budget_bytes: int, cache: CacheConfig, max_model_len: int
) -> NotEnoughMemoryError:
    block_size = group.spec.block_size
    needed_bytes = min_num_blocks(max_model_len, block_size) * group.page_size_bytes
    num_blocks = max(0, budget_bytes) // group.page_size_bytes
    if cache.kv_cache_memory_bytes is None:
        given = f"{format_bytes(budget_bytes)} is free for it"
        more = f"raise gpu_memory_utilization (now {cache.memory_utilization:.2f}), or free memory"
    else:
        given = f"kv_cache_memory_bytes gives it {format_bytes(budget_bytes)}"
        more = f"raise kv_cache_memory_bytes to at least {needed_bytes}"
    longest = max_model_len_that_fits(num_blocks, block_size)
    return NotEnoughMemoryError(
        f"max_model_len={max_model_len} needs {format_bytes(needed_bytes)} of KV cache, {given}",
        hint=f"use max_model_len <= {longest}, or {more}" if longest else more,
        field="max_model_len",
    )
