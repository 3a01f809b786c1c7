"""How the memory for the KV cache is divided into blocks.

Called by the engine between loading the model and starting the scheduler. Pure functions, but for the log.
"""

from __future__ import annotations

import logging

from quire.config.cache import CacheConfig
from quire.core.kv_spec import KVCacheConfig, KVCacheGroupSpec, KVCacheSpec
from quire.errors import NotEnoughMemoryError
from quire.kv_cache.block_counts import MostBlocks, num_blocks_held
from quire.kv_cache.grouping import group_layers
from quire.kv_cache.pool_sizes import PlannedRequests, divide, needed_blocks, needed_bytes
from quire.logger import get_logger
from quire.utils.memory import format_bytes

logger = get_logger(__name__)

KEEPS_ALL: MostBlocks = (None,)
Groups = tuple[KVCacheGroupSpec, ...]


def plan_kv_cache(
    specs: dict[str, KVCacheSpec],
    available_bytes: int,
    cache: CacheConfig,
    max_model_len: int,
    max_chunk_tokens: int | None = None,
    max_num_seqs: int = 1,
    num_drafts: int = 0,
) -> KVCacheConfig:
    """Divide the KV cache into blocks.

    `cache.num_blocks` decides when it is set, for layers without a state; requests longer than that many blocks are
    then refused one by one. Otherwise `cache.kv_cache_memory_bytes`, or `available_bytes`, must hold one request of
    `max_model_len` tokens.

    Args:
        specs: layer name -> what it needs.
        available_bytes: what the executor can spare.
        cache: the settings.
        max_model_len: longest request, in tokens.
        max_chunk_tokens: most tokens of one request that a step computes; None = `max_model_len`.
        max_num_seqs: most requests at once, each of which has recurrent states of its own.
        num_drafts: most drafts of a request in a step, each of which has one more; 0 = there are none.

    Raises:
        NotEnoughMemoryError: it does not fit; names the numbers and the longest `max_model_len` that does.
        UnsupportedError: as `group_layers`.
    """
    budget_bytes = max(0, available_bytes if cache.kv_cache_memory_bytes is None else cache.kv_cache_memory_bytes)
    max_chunk_tokens = min(max_chunk_tokens or max_model_len, max_model_len)
    requests = PlannedRequests(max_model_len, max_chunk_tokens, max_num_seqs, num_drafts)
    frees_blocks = not cache.disable_hybrid_kv_cache_manager
    groups, reason = group_layers(specs, max_model_len, frees_blocks=frees_blocks)
    if cache.num_blocks is None and needed_bytes(groups, requests) > budget_bytes:
        whole, _ = group_layers(specs, max_model_len, frees_blocks=False)
        if whole == groups or needed_bytes(whole, requests) > budget_bytes:
            longest = longest_that_fits(specs, budget_bytes, cache, requests)
            raise _not_enough_memory(needed_bytes(groups, requests), budget_bytes, cache, max_model_len, longest)
        groups, reason = (
            whole,
            "one group: several would need more memory than available while a long prompt is computed",
        )
    is_mixed = not all(spec.keeps_sequence for spec in specs.values())
    logger.log(logging.INFO if is_mixed else logging.DEBUG, "KV cache: %s", reason)
    return divide(groups, budget_bytes, cache, requests)


def one_request_fits(
    specs: dict[str, KVCacheSpec], available_bytes: int, cache: CacheConfig, requests: PlannedRequests
) -> bool:
    """Whether the KV cache holds one of the longest requests; `cache.num_blocks` counts here, too."""
    frees_blocks, given = not cache.disable_hybrid_kv_cache_manager, cache.kv_cache_memory_bytes
    budget_bytes = available_bytes if given is None else given
    for groups in (
        group_layers(specs, requests.max_model_len, frees_blocks=frees)[0] for frees in (frees_blocks, False)
    ):
        if cache.num_blocks is not None:
            return needed_blocks(groups, requests) <= cache.num_blocks
        if needed_bytes(groups, requests) <= budget_bytes:
            return True
    return False


def longest_that_fits(
    specs: dict[str, KVCacheSpec], available_bytes: int, cache: CacheConfig, requests: PlannedRequests
) -> int:
    """The longest `max_model_len`, up to that of `requests`, of which one request fits; 0 = none."""
    longest, too_long = 0, requests.max_model_len + 1
    while too_long - longest > 1:
        middle = (longest + too_long) // 2
        if one_request_fits(specs, available_bytes, cache, requests.of_length(middle)):
            longest = middle
        else:
            too_long = middle
    return longest


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
    fitting = []
    for pool, size in enumerate(config.pool_sizes()):
        limits = (group.spec.most_blocks(max_chunk_tokens) for group in config.groups_of(pool))
        fitting.append((size.num_blocks - 1) / sum(min(blocks_of_one, limit or blocks_of_one) for limit in limits))
    return min(fitting)


def describe_pools(config: KVCacheConfig) -> str:
    """How many blocks there are of what, for the log."""
    parts = []
    for pool, (size, page_bytes) in enumerate(zip(config.pool_sizes(), config.pool_page_bytes(), strict=True)):
        is_state = not config.groups_of(pool)[0].spec.can_take_back
        what = "recurrent states" if is_state else f"blocks of {config.block_size} tokens"
        bytes_of = f" ({format_bytes(size.num_blocks * page_bytes)})" if is_state or len(config.pools) > 1 else ""
        parts.append(f"{size.num_blocks} {what}{bytes_of}")
    return " and ".join(parts)


def _not_enough_memory(
    num_bytes: int, budget_bytes: int, cache: CacheConfig, max_model_len: int, longest: int
) -> NotEnoughMemoryError:
    if cache.kv_cache_memory_bytes is None:
        given = f"{format_bytes(budget_bytes)} is available"
        more = f"raise gpu_memory_utilization (now {cache.memory_utilization:.2f}), or free memory"
    else:
        given = f"kv_cache_memory_bytes provides {format_bytes(budget_bytes)}"
        more = f"raise kv_cache_memory_bytes to at least {num_bytes}"
    return NotEnoughMemoryError(
        f"max_model_len={max_model_len} needs {format_bytes(num_bytes)} of KV cache, {given}",
        hint=f"use max_model_len <= {longest}, or {more}" if longest else more,
        field="max_model_len",
    )
