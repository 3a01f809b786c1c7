"""How the memory for the KV cache is divided into blocks.

Called by the engine between loading the model and starting the scheduler. Pure functions, but for the log.
"""

from __future__ import annotations

import logging
import math

from quire.config.cache import CacheConfig
from quire.core.kv_spec import KVCacheConfig, KVCacheGroupSpec, KVCacheSpec
from quire.errors import NotEnoughMemoryError
from quire.kv_cache.block_counts import MostBlocks, num_blocks_held
from quire.kv_cache.grouping import group_layers
from quire.logger import get_logger
from quire.utils.memory import GIB, format_bytes

logger = get_logger(__name__)

KEEPS_ALL: MostBlocks = (None,)
Groups = tuple[KVCacheGroupSpec, ...]


def plan_kv_cache(
    specs: dict[str, KVCacheSpec],
    available_bytes: int,
    cache: CacheConfig,
    max_model_len: int,
    max_chunk_tokens: int | None = None,
) -> KVCacheConfig:
    """Divide the KV cache into blocks.

    `cache.num_blocks` decides when it is set; requests longer than that many blocks are then refused one by one.
    Otherwise `cache.kv_cache_memory_bytes`, or `available_bytes`, must hold one request of `max_model_len` tokens.

    Args:
        specs: layer name -> what it needs; layers of attention must agree on the shape of a block.
        available_bytes: what the executor can spare.
        cache: the settings.
        max_model_len: longest request, in tokens.
        max_chunk_tokens: most tokens of one request that a step computes; None = `max_model_len`.

    Raises:
        NotEnoughMemoryError: it does not fit; names the numbers and the longest `max_model_len` that does.
        UnsupportedError: as `group_layers`.
    """
    budget_bytes = max(0, available_bytes if cache.kv_cache_memory_bytes is None else cache.kv_cache_memory_bytes)
    frees_blocks = not cache.disable_hybrid_kv_cache_manager
    groups, reason = group_layers(specs, max_model_len, frees_blocks=frees_blocks)
    if cache.num_blocks is not None:
        _log(reason, specs)
        return _divided(cache.num_blocks, groups, cache)
    max_chunk_tokens = max_chunk_tokens or max_model_len
    if _missing_bytes(groups, budget_bytes, max_model_len, max_chunk_tokens) > 0:
        whole, _ = group_layers(specs, max_model_len, frees_blocks=False)
        if len(groups) == 1 or _missing_bytes(whole, budget_bytes, max_model_len, max_chunk_tokens) > 0:
            longest = _longest_that_fits(specs, budget_bytes, max_model_len, max_chunk_tokens, frees_blocks)
            raise _not_enough_memory(groups, budget_bytes, cache, max_model_len, max_chunk_tokens, longest)
        groups, reason = (
            whole,
            "one group: several would need more memory than available while a long prompt is computed",
        )
    _log(reason, specs)
    return _divided(budget_bytes // _page_bytes(groups), groups, cache)


def min_num_blocks(max_model_len: int, block_size: int, most: MostBlocks = KEEPS_ALL) -> int:
    """Blocks that one request of `max_model_len` tokens needs, the null block included.

    The last token is sampled and never written, so `max_model_len - 1` tokens are stored.

    Args:
        most: per group, most blocks that a request holds at once.
    """
    return int(num_blocks_held(-(-max(1, max_model_len - 1) // block_size), most)) + 1


def concurrency(config: KVCacheConfig, max_model_len: int, max_chunk_tokens: int) -> float:
    """How many requests of `max_model_len` tokens fit at once, when each holds the most it ever does."""
    blocks_of_one = max_model_len / config.block_size
    limits = (group.spec.most_blocks(max_chunk_tokens) for group in config.groups)
    return (config.num_blocks - 1) / sum(min(blocks_of_one, limit or blocks_of_one) for limit in limits)


def _log(reason: str, specs: dict[str, KVCacheSpec]) -> None:
    is_mixed = not all(spec.keeps_sequence for spec in specs.values())
    logger.log(logging.INFO if is_mixed else logging.DEBUG, "KV cache: %s", reason)


def _page_bytes(groups: Groups) -> int:
    return KVCacheConfig(num_blocks=0, groups=groups).page_size_bytes


def _missing_bytes(groups: Groups, budget_bytes: int, max_model_len: int, max_chunk_tokens: int) -> int:
    """Bytes that one request of `max_model_len` tokens lacks; 0 or less when it fits."""
    most = [group.spec.most_blocks(min(max_chunk_tokens, max_model_len)) for group in groups]
    needed = min_num_blocks(max_model_len, groups[0].spec.block_size, most)
    return (needed - budget_bytes // _page_bytes(groups)) * _page_bytes(groups)


def _longest_that_fits(
    specs: dict[str, KVCacheSpec], budget_bytes: int, too_long: int, max_chunk_tokens: int, frees_blocks: bool
) -> int:
    """The longest `max_model_len` for which there is a plan, as one for `too_long` tokens is not; 0 = none."""
    longest = 0
    while too_long - longest > 1:
        middle = (longest + too_long) // 2
        plans = [group_layers(specs, middle, frees_blocks=frees)[0] for frees in {frees_blocks, False}]
        if any(_missing_bytes(groups, budget_bytes, middle, max_chunk_tokens) <= 0 for groups in plans):
            longest = middle
        else:
            too_long = middle
    return longest


def _divided(num_blocks: int, groups: Groups, cache: CacheConfig) -> KVCacheConfig:
    num_swap_blocks = _num_swap_blocks(cache.swap_space, _page_bytes(groups))
    return KVCacheConfig(num_blocks=num_blocks, groups=groups, num_swap_blocks=num_swap_blocks)


def _num_swap_blocks(swap_space: float, page_size_bytes: int) -> int:
    """Blocks in so many GiB."""
    num_blocks = int(swap_space * GIB) // page_size_bytes
    if swap_space and not num_blocks:
        raise NotEnoughMemoryError(
            f"swap_space={swap_space:g} GiB is less than one block of {format_bytes(page_size_bytes)}",
            hint=f"use swap_space >= {math.ceil(1000 * page_size_bytes / GIB) / 1000:g}, or 0",
            field="swap_space",
        )
    return num_blocks


def _not_enough_memory(
    groups: Groups, budget_bytes: int, cache: CacheConfig, max_model_len: int, max_chunk_tokens: int, longest: int
) -> NotEnoughMemoryError:
    held_bytes = budget_bytes // _page_bytes(groups) * _page_bytes(groups)
    needed_bytes = held_bytes + _missing_bytes(groups, budget_bytes, max_model_len, max_chunk_tokens)
    if cache.kv_cache_memory_bytes is None:
        given = f"{format_bytes(budget_bytes)} is available"
        more = f"raise gpu_memory_utilization (now {cache.memory_utilization:.2f}), or free memory"
    else:
        given = f"kv_cache_memory_bytes provides {format_bytes(budget_bytes)}"
        more = f"raise kv_cache_memory_bytes to at least {needed_bytes}"
    return NotEnoughMemoryError(
        f"max_model_len={max_model_len} needs {format_bytes(needed_bytes)} of KV cache, {given}",
        hint=f"use max_model_len <= {longest}, or {more}" if longest else more,
        field="max_model_len",
    )
