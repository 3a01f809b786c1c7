"""Offloading: the scheduler's half of a tier that keeps blocks in a store of ours (host memory, a disk).

A `KVTier`, called through `KVTiers`. Owns the measured costs of loads and of prompts. All that a request computed is
stored when it ends; what a later one needs is loaded where that takes less time than to compute it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from quire.core.request import Request
from quire.core.runner_output import ModelRunnerOutput
from quire.core.scheduler_output import SchedulerOutput
from quire.core.stats import OffloadStats
from quire.kv_offload.store import BlockStore
from quire.scheduler.kv_tier import ExternalHit, KVTier
from quire.scheduler.swap_costs import Measurements, SwapCosts

MAX_STORING_SHARE = 0.25
"""Of the cache's blocks, those that may wait to be stored: they are not free meanwhile."""
RETRY_S = 60.0
"""Seconds without a load after which one is tried although it seemed too slow: disks change."""
LIMIT_FACTOR = 2.0
"""Of the time to compute its tokens, after which a load is given up."""
MIN_LIMIT_S = 1.0
LIMIT_UNKNOWN_S = 60.0
"""The same limit while no prompt has been measured."""


class Offloading(KVTier):
    """What is loaded, and what is stored.

    Args:
        store: shared with the worker's half.
        block_size: tokens per block.
        num_blocks: of the cache.
        clock: seconds.
    """

    def __init__(
        self, store: BlockStore, block_size: int, num_blocks: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._store = store
        self._block_size = block_size
        self._max_storing = int(num_blocks * MAX_STORING_SHARE)
        self._clock = clock
        self._prompts = SwapCosts()
        self._loads = Measurements()
        self._last_load_at = -RETRY_S

    # --- at admission ---

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> ExternalHit | None:
        """The blocks that are stored beyond what is cached, if to load them takes less time than to compute them."""
        first = num_computed_tokens // self._block_size
        found = self._store.lookup(request.block_hashes, first)
        if not found.num_blocks:
            return None
        end = (first + found.num_blocks) * self._block_size
        compute_s = self._prompts.estimate_recompute_s(num_computed_tokens, end)
        if found.num_on_disk and self._is_slower(found.num_on_disk, compute_s):
            self._store.count_kept_out()
            return None
        limit_s = LIMIT_UNKNOWN_S if compute_s is None else max(MIN_LIMIT_S, LIMIT_FACTOR * compute_s)
        return ExternalHit(end, is_async=True, time_limit_s=limit_s)

    def _is_slower(self, num_on_disk: int, compute_s: float | None) -> bool:
        """Whether loading takes longer than computing, as far as both are known."""
        block_s = self._loads.estimate(num_on_disk)
        if block_s is None or compute_s is None or block_s * num_on_disk < compute_s:
            return False
        return self._clock() - self._last_load_at < RETRY_S

    # --- at the end ---

    def request_finished(self, request: Request, keys: Sequence[bytes], block_ids: np.ndarray) -> Sequence[bytes]:
        """The blocks from the first on that is not stored; none while many wait to be."""
        self._store.touch(keys)
        missing = keys[self._store.lookup(keys).num_blocks :]
        num_storing = self._store.num_storing
        if num_storing and num_storing + len(missing) > self._max_storing:
            self._store.count_dropped(len(missing))
            return ()
        return missing

    def release_blocks(self) -> None:
        """Free blocks are short: those that wait to be stored are given up."""
        self._store.give_up_stores()

    # --- messages ---

    def take_stats(self) -> OffloadStats | None:
        """As `KVTier`."""
        return self._store.take_stats()

    def update_from_output(self, scheduled: SchedulerOutput, output: ModelRunnerOutput, seconds: float | None) -> None:
        """Note what prompts and loads cost."""
        if scheduled.total_num_scheduled_tokens:
            self._prompts.record(scheduled, output, seconds)
        for num_blocks, load_s in self._store.take_load_times():
            self._loads.record(num_blocks, load_s / num_blocks)
            self._last_load_at = self._clock()
