"""How many blocks each pool of the KV cache gets. Called by planning and by the worker. Pure functions.

Pools of states have a block for each request that runs and one for its newest checkpoint, those for checkpoints of
requests that have ended, and some for states before drafts; together at most half of the memory, where there is
attention, too, unless that can use less. What is left is divided among pools of attention so that requests of a
middling length run out of all of them at once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from quire.config.cache import CacheConfig
from quire.core.drafts import DRAFTS_PER_REQUEST
from quire.core.kv_spec import KVCacheConfig, KVCacheGroupSpec, KVCacheSpec, PoolSize
from quire.errors import NotEnoughMemoryError
from quire.kv_cache.block_counts import num_blocks_held
from quire.utils.memory import GIB, format_bytes

STATE_SHARE = 0.5
"""Most of the memory that states take beside attention, unless one request needs more."""

MIDDLING = 4
"""Requests of `max_model_len` divided by this are those that pools of attention are divided for."""

Pool = Sequence[KVCacheGroupSpec]


@dataclass(frozen=True, slots=True)
class PlannedRequests:
    """What the cache is planned for: tokens of the longest request and of a step of it, requests at once, and most
    drafts of one of them in a step.
    """

    max_model_len: int
    max_chunk_tokens: int
    max_num_seqs: int = 1
    num_drafts: int = 0

    def of_length(self, num_tokens: int) -> PlannedRequests:
        """The same of other lengths."""
        return replace(self, max_model_len=num_tokens, max_chunk_tokens=min(self.max_chunk_tokens, num_tokens))

    def num_held(self, pool: Pool) -> int:
        """Blocks of a pool that one of the longest holds at once; its last token is sampled and never written."""
        num_blocks = -(-max(1, self.max_model_len - 1) // pool[0].spec.block_size)
        most = [group.spec.most_blocks(self.max_chunk_tokens) for group in pool]
        return max(int(num_blocks_held(num_blocks, most)), 1 if _can_take_back(pool) else 2)


def needed_bytes(groups: Sequence[KVCacheGroupSpec], requests: PlannedRequests) -> int:
    """Bytes that one request of the longest needs, null blocks included."""
    return sum((requests.num_held(pool) + 1) * _page_bytes(pool) for pool in _pools(groups))


def needed_blocks(groups: Sequence[KVCacheGroupSpec], requests: PlannedRequests) -> int:
    """Blocks of the first pool of attention that one request of the longest needs, with the null block; 0 = no pool."""
    return next((requests.num_held(pool) + 1 for pool in _pools(groups) if _can_take_back(pool)), 0)


def num_state_blocks(cache: CacheConfig, max_num_seqs: int, num_drafts: int = 0) -> int:
    """Blocks of a pool of states, as far as there is memory; `num_drafts` as in `PlannedRequests`."""
    num_for_drafts = max(num_drafts, DRAFTS_PER_REQUEST * max_num_seqs) if num_drafts else 0
    if not cache.enable_prefix_caching:
        return 1 + max_num_seqs + num_for_drafts
    num_checkpoints = cache.num_state_checkpoints
    return 1 + 2 * max_num_seqs + (max_num_seqs if num_checkpoints is None else num_checkpoints) + num_for_drafts


def useful_bytes(
    specs: Mapping[str, KVCacheSpec], cache: CacheConfig, max_model_len: int, max_num_seqs: int, num_drafts: int = 0
) -> int:
    """Bytes of blocks for `max_num_seqs` requests of the longest, and of null blocks: more would never be used."""
    total = 0
    for spec in specs.values():
        num_blocks = max_num_seqs * -(-max_model_len // spec.block_size) + 1
        if not spec.can_take_back:
            num_blocks = num_state_blocks(cache, max_num_seqs, num_drafts)
        total += spec.page_size_bytes * num_blocks
    return total


def divide(
    groups: tuple[KVCacheGroupSpec, ...], budget_bytes: int, cache: CacheConfig, requests: PlannedRequests
) -> KVCacheConfig:
    """The cache in so many bytes, which hold one request of the longest, or of `cache.num_blocks` blocks."""
    pools = _pools(groups)
    page_bytes = [_page_bytes(pool) for pool in pools]
    if len(pools) == 1 and _can_take_back(pools[0]):
        sizes = [budget_bytes // page_bytes[0] if cache.num_blocks is None else cache.num_blocks]
    else:
        sizes = _sizes(pools, budget_bytes, cache, requests)
    swap_sizes = _swap_sizes(cache.swap_space, sizes, page_bytes)
    counts = zip(sizes, swap_sizes, strict=True)
    made = tuple(PoolSize(num_blocks=size, num_swap_blocks=swap) for size, swap in counts) if len(pools) > 1 else ()
    return KVCacheConfig(num_blocks=sum(sizes), groups=groups, num_swap_blocks=sum(swap_sizes), pools=made)


def _sizes(pools: Sequence[Pool], budget_bytes: int, cache: CacheConfig, requests: PlannedRequests) -> list[int]:
    """Blocks of each pool, where there are several, or one of states."""
    states = [pool for pool in pools if not _can_take_back(pool)]
    others = [pool for pool in pools if _can_take_back(pool)]
    if cache.num_blocks is None:
        least_bytes = sum((requests.num_held(pool) + 1) * _page_bytes(pool) for pool in others)
        share_bytes = (budget_bytes - least_bytes) * (STATE_SHARE if others else 1.0)
        useful_blocks = [requests.max_num_seqs * requests.num_held(pool) + 1 for pool in others]
        useful = sum(num * _page_bytes(pool) for num, pool in zip(useful_blocks, others, strict=True))
        share_bytes = max(share_bytes, budget_bytes - useful)  # what attention would never need
    else:
        given = _sizes_of_attention(others, 0, cache, requests)
        left_bytes = budget_bytes - sum(num * _page_bytes(pool) for num, pool in zip(given, others, strict=True))
        share_bytes = max(left_bytes, STATE_SHARE * budget_bytes)  # the blocks may be more than the budget is for
    state_bytes = sum(map(_page_bytes, states))
    wanted = num_state_blocks(cache, requests.max_num_seqs, requests.num_drafts)
    num_states = min(wanted, int(share_bytes // max(1, state_bytes)))
    num_states = max(num_states, 3)  # the null block, the state that is read, and the one that is written
    left_bytes = budget_bytes - num_states * state_bytes
    sizes = iter(_sizes_of_attention(others, left_bytes, cache, requests))
    return [next(sizes) if _can_take_back(pool) else num_states for pool in pools]


def _sizes_of_attention(
    pools: Sequence[Pool], budget_bytes: int, cache: CacheConfig, requests: PlannedRequests
) -> list[int]:
    if not pools:
        return []
    middling = requests.of_length(max(1, requests.max_model_len // MIDDLING))
    shares = [middling.num_held(pool) for pool in pools]
    if cache.num_blocks is not None:
        return [max(2, cache.num_blocks * share // shares[0]) for share in shares]
    least = [requests.num_held(pool) + 1 for pool in pools]
    left_bytes = budget_bytes - sum(num * _page_bytes(pool) for num, pool in zip(least, pools, strict=True))
    num_more = left_bytes / sum(share * _page_bytes(pool) for share, pool in zip(shares, pools, strict=True))
    return [num + int(num_more * share) for num, share in zip(least, shares, strict=True)]


def _swap_sizes(swap_space: float, sizes: Sequence[int], page_bytes: Sequence[int]) -> list[int]:
    """Blocks of each pool's part of so many GiB, in proportion to the bytes of the pools."""
    total_bytes = sum(size * num for size, num in zip(sizes, page_bytes, strict=True))
    swap_sizes = []
    for size, num_bytes in zip(sizes, page_bytes, strict=True):
        share = size * num_bytes / total_bytes if len(sizes) > 1 else 1.0
        swap_sizes.append(int(swap_space * GIB * share) // num_bytes)
        if swap_space and not swap_sizes[-1]:
            raise NotEnoughMemoryError(
                f"swap_space={swap_space:g} GiB is less than one block of {format_bytes(num_bytes)}",
                hint=f"use swap_space >= {math.ceil(1000 * num_bytes / share / GIB) / 1000:g}, or 0",
                field="swap_space",
            )
    return swap_sizes


def _pools(groups: Sequence[KVCacheGroupSpec]) -> list[list[KVCacheGroupSpec]]:
    return [[one for one in groups if one.pool == pool] for pool in range(1 + max(one.pool for one in groups))]


def _page_bytes(pool: Pool) -> int:
    return max(group.page_size_bytes for group in pool)


def _can_take_back(pool: Pool) -> bool:
    return all(group.spec.can_take_back for group in pool)
