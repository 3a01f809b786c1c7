"""Swapping: requests whose blocks are in the swap space, until these come back.

The first `KVTier`, called through `KVTiers`. Owns the host blocks, and the copies of the next message. Host blocks of a
request that comes back are free at once: no request is swapped out later in that step, and the worker copies out before
it copies in. Nothing depends on these blocks: when they cannot be trusted, their request is computed again.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from quire.core.kv_spec import KVCacheConfig
from quire.core.request import Request
from quire.core.runner_output import ModelRunnerOutput
from quire.core.scheduler_output import NO_BLOCK_COPIES, BlockCopies, SchedulerOutput
from quire.kv_cache.block_pool import NULL_BLOCK_ID
from quire.kv_cache.cached_prefix import CachedPrefix
from quire.kv_cache.manager import KVCacheManager
from quire.kv_cache.swap_pool import NO_HOST_BLOCK, SwappedBlocks, SwapPool
from quire.scheduler.kv_tier import ExternalHit, KVTier, SwapCopies
from quire.scheduler.request_table import RequestTable
from quire.scheduler.running import RunningRows, num_blocks_to_grow
from quire.scheduler.scheduling_policy import WaitingRequests
from quire.scheduler.step_plan import StepPlan
from quire.scheduler.swap_costs import SwapCosts, is_swap_cheaper

# Steps that running rows must be able to grow by before a request comes back beside them, and for which it is not the
# next victim: less, and blocks would travel to and fro without a token in between.
COOLDOWN_STEPS = 16


class Swapping(KVTier):
    """The swapped requests, and what moves between the cache and the swap space.

    Args:
        mode: "auto" weighs costs; "swap" swaps whatever has room; "recompute" nothing.
        kv_cache_config: number of blocks of the swap space, 0 = there is none, and bytes of a block.
        waiting: requests without blocks here.
    """

    def __init__(
        self,
        mode: str,
        kv_cache_config: KVCacheConfig,
        kv: KVCacheManager,
        table: RequestTable,
        running: RunningRows,
        waiting: WaitingRequests,
    ) -> None:
        sizes = [0 if mode == "recompute" else size.num_swap_blocks for size in kv_cache_config.pool_sizes()]
        first, *more = map(SwapPool, sizes, kv_cache_config.first_swap_block_ids())
        self._pool, self._more_pools = first, more
        self._pool_of_group = tuple(group.pool for group in kv_cache_config.groups)
        self._first_block_ids = kv_cache_config.first_block_ids()
        self._page_bytes = kv_cache_config.pool_page_bytes()
        self._kv = kv
        self._table = table
        self._running = running
        self._waiting = waiting
        self._costs = SwapCosts() if mode == "auto" and any(sizes) else None
        self._blocks: dict[int, SwappedBlocks] = {}
        self._outs: dict[int, BlockCopies] = {}
        self._ins: list[BlockCopies] = []
        self._returned: dict[int, int] = {}
        self._num_steps = 0

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def _pools(self) -> tuple[SwapPool, ...]:
        return (self._pool, *self._more_pools)

    def num_bytes(self, block_ids: np.ndarray) -> int:
        """Bytes of these blocks of the cache, all layers together."""
        if not self._more_pools:
            return len(block_ids) * self._page_bytes[0]
        pools = np.searchsorted(self._first_block_ids, block_ids, side="right") - 1
        return int(np.array(self._page_bytes)[pools].sum())

    @property
    def has_space(self) -> bool:
        """Whether there is any, used or not."""
        return any(pool.num_blocks for pool in self._pools)

    # --- out ---

    def request_preempted(self, request: Request, plan: StepPlan) -> bool:
        """Take in a request that is about to lose its row, if its blocks have room here and are worth it.

        The worker copies them before anything else of its next step, so they are free at once.
        """
        num_tokens = int(self._table.num_computed_tokens[request.row])
        if not num_tokens or not self._pool.num_free_blocks or not self._kv.may_swap(request.row, num_tokens):
            return False
        num_blocks = -(-num_tokens // self._kv.block_size)
        block_ids = [ids[:num_blocks] for ids in self._kv.get_block_ids(request.row)]
        num_held = self._by_pool([int(np.count_nonzero(ids != NULL_BLOCK_ID)) for ids in block_ids])
        has_room = all(num <= pool.num_free_blocks for num, pool in zip(num_held, self._pools, strict=True))
        if not has_room or not self._is_worth_it(request, num_tokens, sum(num_held)):
            return False
        host_block_ids = [pool.take(num) for num, pool in zip(num_held, self._pools, strict=True)]
        blocks = SwappedBlocks(num_tokens, _spread(host_block_ids, block_ids, self._pool_of_group))
        device_block_ids, placed = np.concatenate(block_ids), np.concatenate(blocks.host_block_ids)
        is_held = device_block_ids != NULL_BLOCK_ID
        self._outs[request.handle] = BlockCopies(device_block_ids[is_held], placed[is_held])
        self._blocks[request.handle] = blocks
        plan.num_swap_preemptions += 1
        return True

    def _by_pool(self, per_group: Sequence[int]) -> list[int]:
        counts = [0] * len(self._pools)
        for pool, count in zip(self._pool_of_group, per_group, strict=True):
            counts[pool] += count
        return counts

    def _free(self, blocks: SwappedBlocks) -> None:
        """Give the host blocks back, each to its pool."""
        for number, pool in enumerate(self._pools):
            of_pool = [
                ids for ids, owner in zip(blocks.host_block_ids, self._pool_of_group, strict=True) if owner == number
            ]
            block_ids = np.concatenate(of_pool)
            pool.free(block_ids[block_ids != NO_HOST_BLOCK])

    def _is_worth_it(self, request: Request, num_tokens: int, num_held: int) -> bool:
        if self._costs is None:
            return True
        num_kept = min(num_tokens, self._kv.num_kept_tokens(request, self._is_room_ample()))
        swap_s = self._costs.estimate_swap_s(num_held, max(0, num_held - num_kept // self._kv.block_size))
        return is_swap_cheaper(swap_s, self._costs.estimate_recompute_s(num_kept, num_tokens))

    def _is_room_ample(self) -> bool:
        """Whether free blocks, before the victim's, will do for the rows that run and for the first that waits."""
        num_needed = np.array(num_blocks_to_grow(self._running.rows, self._table, self._kv, COOLDOWN_STEPS))
        if self._waiting:
            num_needed += self._kv.num_blocks_held(np.array(len(self._waiting.peek().token_ids)))
        return bool((num_needed <= self._kv.free_counts()).all())

    # --- back ---

    def keeps(self, request: Request) -> bool:
        """Whether blocks of a request are here."""
        return request.handle in self._blocks

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> ExternalHit | None:
        """All that it had computed, in every KV cache group."""
        blocks = self._blocks.get(request.handle)
        if blocks is None or blocks.num_tokens <= num_computed_tokens:
            return None
        return ExternalHit(blocks.num_tokens, swapped=blocks)

    def update_state_after_alloc(
        self, request: Request, prefix: CachedPrefix, hit: ExternalHit | None, block_ids: tuple[np.ndarray, ...]
    ) -> None:
        """Note the copies back; the host blocks are free."""
        blocks = self._blocks.pop(request.handle)
        if hit is not None:
            for host_ids, placed in zip(blocks.host_block_ids, block_ids, strict=True):
                self._ins.append(self._copies_back(prefix, host_ids, placed[: len(host_ids)]))
        self._free(blocks)
        self._returned[request.handle] = self._num_steps

    def _copies_back(self, prefix: CachedPrefix, host_ids: np.ndarray, placed: np.ndarray) -> BlockCopies:
        """From the host blocks of one group to the blocks that were placed for them, shared ones left out."""
        is_copied = (host_ids != NO_HOST_BLOCK) & ~np.isin(placed, self._kv.shared_on_restore(prefix))
        return BlockCopies(host_ids[is_copied], placed[is_copied])

    def rows_to_spare(self) -> np.ndarray | None:
        """Running rows that came back less than `COOLDOWN_STEPS` steps ago; None when there are none."""
        if not self._returned:
            return None
        oldest = self._num_steps - COOLDOWN_STEPS
        self._returned = {handle: step for handle, step in self._returned.items() if step > oldest}
        rows = self._running.rows
        return rows[np.isin(self._table.handle[rows], list(self._returned))]

    # --- messages ---

    def take_copies(self) -> SwapCopies:
        """The copies since the last message; call once for each message that is sent."""
        self._num_steps += 1
        copies = SwapCopies(_concatenate(list(self._outs.values())), _concatenate(self._ins), tuple(self._outs))
        self._outs, self._ins = {}, []
        return copies

    def update_from_output(self, scheduled: SchedulerOutput, output: ModelRunnerOutput, seconds: float | None) -> None:
        """Note what the step's copies and prompts cost."""
        if self._costs is not None:
            self._costs.record(scheduled, output, seconds)

    def give_up(self, handle: int) -> None:
        """Forget a request's blocks, if there are any: it ends, or they may hold anything."""
        blocks = self._blocks.pop(handle, None)
        if blocks is not None:
            self._free(blocks)
            self._outs.pop(handle, None)


def _spread(
    host_block_ids: list[np.ndarray], block_ids: list[np.ndarray], pool_of_group: Sequence[int]
) -> tuple[np.ndarray, ...]:
    """The host blocks of each pool laid out as the blocks that they stand for, per group; -1 for null blocks."""
    spread, starts = [], [0] * len(host_block_ids)
    for ids, pool in zip(block_ids, pool_of_group, strict=True):
        is_held = ids != NULL_BLOCK_ID
        host_ids = np.full(len(ids), NO_HOST_BLOCK, dtype=np.int32)
        end = starts[pool] + int(np.count_nonzero(is_held))
        host_ids[is_held] = host_block_ids[pool][starts[pool] : end]
        spread.append(host_ids)
        starts[pool] = end
    return tuple(spread)


def _concatenate(copies: list[BlockCopies]) -> BlockCopies:
    if not copies:
        return NO_BLOCK_COPIES
    return BlockCopies(
        np.concatenate([one.source_ids for one in copies]), np.concatenate([one.target_ids for one in copies])
    )
