"""Offloading: the scheduler's half of a tier that keeps blocks in a store of ours (host memory, a disk).

A `KVTier`, called through `KVTiers`. Owns the measured costs of loads and of prompts. All that a request computed is
stored when it ends; what a later one needs is loaded where that takes less time than to compute it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from quire.core.cache_info import MissReason
from quire.core.kv_spec import KVCacheConfig
from quire.core.request import Request
from quire.core.runner_output import ModelRunnerOutput
from quire.core.scheduler_output import SchedulerOutput
from quire.core.stats import OffloadStats
from quire.kv_cache.stored_prefix import group_name, longest_stored_prefix
from quire.kv_offload.store import BlockStore, Place
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
        kv_cache_config: groups, and number and size of blocks.
        clock: seconds.
    """

    keeps_groups = True

    def __init__(
        self, store: BlockStore, kv_cache_config: KVCacheConfig, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._store = store
        self._block_size = kv_cache_config.block_size
        self._max_storing = int(kv_cache_config.num_blocks * MAX_STORING_SHARE)
        self._specs = [group.spec for group in kv_cache_config.groups]
        page_bytes = kv_cache_config.pool_page_bytes()
        self._block_bytes = [page_bytes[group.pool] for group in kv_cache_config.groups]
        self._keeps_sequence = [spec.keeps_sequence for spec in self._specs] == [True]
        self._clock = clock
        self._prompts = SwapCosts()
        self._loads = Measurements()
        self._last_load_at = -RETRY_S
        self._storing: set[bytes] = set()  # not findable yet

    # --- at admission ---

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> ExternalHit | None:
        """The blocks that are stored beyond what is cached, if to load them takes less time than to compute them."""
        first = num_computed_tokens // self._block_size
        most = (len(request.token_ids) - 1) // self._block_size  # one token is computed
        names = request.block_hashes[:most]
        num_blocks, bytes_on_disk = self._look_up(names, first) if most > first else (first, 0)
        if num_blocks == first:
            return None
        end = num_blocks * self._block_size
        compute_s = self._prompts.estimate_recompute_s(num_computed_tokens, end)
        if bytes_on_disk and self._is_slower(bytes_on_disk, compute_s):
            self._store.count_kept_out()
            return None
        limit_s = LIMIT_UNKNOWN_S if compute_s is None else max(MIN_LIMIT_S, LIMIT_FACTOR * compute_s)
        return ExternalHit(end, is_async=True, time_limit_s=limit_s)

    def prefetch(self, request: Request, num_computed_tokens: int) -> None:
        """As `KVTier`: what would be loaded from the disk is read to host memory."""
        first, most = num_computed_tokens // self._block_size, (len(request.token_ids) - 1) // self._block_size
        names = request.block_hashes[:most]
        end, bytes_on_disk = self._look_up(names, first) if len(names) > first else (first, 0)
        if not bytes_on_disk:
            return
        compute_s = self._prompts.estimate_recompute_s(num_computed_tokens, end * self._block_size)
        if self._is_slower(bytes_on_disk, compute_s):
            return
        starts = [max(first, spec.first_block_needed(end)) for spec in self._specs]
        keys = [
            group_name(names[number], group)
            for number in range(first, end) for group, start in enumerate(starts) if number >= start
        ]  # fmt: skip
        places = self._store.places(keys)
        self._store.prefetch([keys[i] for i in np.flatnonzero(places == Place.DISK).tolist()])

    def explain_miss(self, request: Request, num_tokens: int) -> MissReason | None:
        """As `KVTier`."""
        first, most = num_tokens // self._block_size, (len(request.token_ids) - 1) // self._block_size
        names = request.block_hashes[:most]
        if first >= len(names):
            return None
        if self._look_up(names, first)[0] > first:
            return MissReason.SLOWER_TO_LOAD
        if names[first] in self._storing:
            return MissReason.BEING_STORED
        if self._store.is_hung:
            return MissReason.TIER_DOWN
        return MissReason.OTHER_DIGEST if self._store.is_of_others(names[first]) else MissReason.NOT_IN_TIER

    def _look_up(self, names: Sequence[bytes], first: int) -> tuple[int, int]:
        """Blocks of the longest prefix that is here, of which `first` are cached, and bytes of it on the disk."""
        if self._keeps_sequence:
            found = self._store.lookup(names, first)
            return first + found.num_blocks, found.num_on_disk * self._block_bytes[0]
        places: dict[int, np.ndarray] = {}

        def find(group: int, start: int, end: int) -> np.ndarray:
            places[group] = self._store.places([group_name(name, group) for name in names[start:end]])
            is_here: np.ndarray = places[group] != Place.NOWHERE
            return is_here

        end = longest_stored_prefix(self._specs, find, first, len(names))
        on_disk = 0
        for group, found_places in places.items():
            needed = found_places[max(0, self._specs[group].first_block_needed(max(1, end)) - first) : end - first]
            on_disk += int(np.count_nonzero(needed == Place.DISK)) * self._block_bytes[group]
        return end, on_disk

    def _is_slower(self, bytes_on_disk: int, compute_s: float | None) -> bool:
        """Whether loading takes longer than computing, as far as both are known."""
        byte_s = self._loads.estimate(bytes_on_disk)
        if byte_s is None or compute_s is None or byte_s * bytes_on_disk < compute_s:
            return False
        return self._clock() - self._last_load_at < RETRY_S

    # --- at the end ---

    def request_finished(self, request: Request, keys: Sequence[bytes], block_ids: np.ndarray) -> Sequence[bytes]:
        """Those that are not stored; none while many wait to be."""
        self._store.touch(keys)
        is_missing = self._store.places(keys) == Place.NOWHERE
        missing = [keys[i] for i in np.flatnonzero(is_missing).tolist() if keys[i] not in self._storing]
        num_storing = self._store.num_storing
        if num_storing and num_storing + len(missing) > self._max_storing:
            self._store.count_dropped(len(missing))
            return ()
        self._storing.update(missing)
        return missing

    def blocks_to_copy(self, request: Request, keys: Sequence[bytes]) -> Sequence[bytes]:
        """As `KVTier`: where there is host memory, all that are not here."""
        if not self._store.copies_at_once:
            return ()
        return [keys[i] for i in np.flatnonzero(self._store.places(keys) == Place.NOWHERE).tolist()]

    def transfer_ended(self, keys: Sequence[bytes], *, is_save: bool, is_done: bool) -> None:
        """As `KVTier`."""
        if is_save:
            self._storing.difference_update(keys)

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
        for num_bytes, load_s in self._store.take_load_times():
            self._loads.record(num_bytes, load_s / num_bytes)
            self._last_load_at = self._clock()
