"""KVTiers: the swap space, a further tier behind the KV cache if there is one, and the blocks in flight between them.

Called by the scheduler and by admission, which knows it as a `RequestGroup`, too: a request whose blocks are being
loaded waits, and others pass it. Owns the transfers in flight. A block in flight has a user, its transfer, until the
worker reports that; so a request may be aborted, or end, while its blocks are still read or written.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from quire.core.cache_info import CacheMiss, MissReason
from quire.core.engine_messages import FinishedRequest
from quire.core.kv_hints import PREFETCH, SHARE, hinted_actions
from quire.core.kv_transfer import BlockTransfer, KVTransferMeta
from quire.core.request import Request, RequestStatus
from quire.core.runner_output import ModelRunnerOutput
from quire.core.sampling_params import KV_TRANSFER_PARAMS
from quire.core.scheduler_output import SchedulerOutput
from quire.kv_cache.cached_prefix import CachedPrefix
from quire.kv_cache.event_recorder import KVEventRecorder
from quire.kv_cache.manager import KVCacheManager
from quire.kv_cache.stored_prefix import group_name
from quire.scheduler.candidate import Candidate
from quire.scheduler.kv_tier import ExternalHit, KVTier, SwapCopies
from quire.scheduler.request_group import RequestGroup
from quire.scheduler.request_table import RequestTable
from quire.scheduler.step_plan import StepPlan
from quire.scheduler.swapping import Swapping
from quire.scheduler.waiting import Blocked, WaitReason

MAX_PREFETCHED = 4
"""Waiting requests whose blocks are looked for after one step."""
_SURE = frozenset((MissReason.LOAD_FAILED, MissReason.SLOWER_TO_LOAD, MissReason.BEING_STORED, MissReason.EVICTED))
_LIKELY = _SURE | {MissReason.OTHER_DIGEST, MissReason.TIER_DOWN}
_WAS_HERE = _LIKELY | {MissReason.NOT_IN_TIER}
TIERS_EXPLAIN = {
    MissReason.COLD: _LIKELY, MissReason.EVICTED: _WAS_HERE, MissReason.CACHE_RESET: _WAS_HERE,
    MissReason.NO_CHECKPOINT: _SURE, MissReason.DIFFERENT_TOKEN: _SURE, MissReason.TEMPLATE_CHANGED: _SURE,
}  # fmt: skip
"""What tiers may say in place of what the cache says."""


@dataclass(frozen=True, slots=True)
class _InFlight:
    """One transfer of a request; `blocks` are those it uses, None where they are those of the request's row."""

    transfer: BlockTransfer
    request: Request
    blocks: CachedPrefix | None
    is_save: bool = False

    @property
    def handle(self) -> int:
        return self.request.handle

    @property
    def fills_row(self) -> bool:
        return self.blocks is None and not self.is_save


class KVTiers(RequestGroup):
    """Where keys and values are beside the cache.

    Args:
        tier: None = there is the swap space alone. It is used where prefix caching names the blocks; with layers that
            free blocks, and with several groups, where it `keeps_groups`.

    Attributes:
        swapping: the swap space.
        lost: handles of requests that end because their blocks could not be loaded; emptied by the scheduler.
        sends_messages: `attach_message` is to be called.
    """

    def __init__(self, kv: KVCacheManager, table: RequestTable, swapping: Swapping, tier: KVTier | None) -> None:
        self.swapping = swapping
        self._kv = kv
        self._table = table
        tiers = () if tier is None or not kv.names_blocks else tier.parts
        self._tiers = tuple(one for one in tiers if kv.keeps_sequence or one.keeps_groups)
        self._prompts: dict[int, Request] = {}  # by handle, running, whose prompts' blocks are to be saved early
        self._in_flight: dict[int, _InFlight] = {}
        self._loading: dict[int, int] = {}  # handle -> transfer, of requests that wait for it
        self._loaded: dict[int, CachedPrefix] = {}
        self._refused: dict[int, MissReason] = {}  # by handle, requests that are computed whatever tiers have, and why
        self._arrived: list[Request] = []  # not looked at yet, whether they have to wait
        self._loads: list[BlockTransfer] = []  # of the next message
        self._saves: list[BlockTransfer] = []
        self._num_transfers = 0
        self._is_pending = False
        self._recorder: KVEventRecorder | None = None
        self.lost: list[int] = []
        self._messenger = next((one for one in self._tiers if one.sends_messages), None)
        self.sends_messages = self._messenger is not None

    @property
    def is_waiting(self) -> bool:
        """Whether the worker needs a message even where nothing computes."""
        return bool(self._in_flight) or self._is_pending or any(tier.has_pending_work() for tier in self._tiers)

    @property
    def has_tiers(self) -> bool:
        """Whether there are any beside the swap space."""
        return len(self._tiers) > 0

    @property
    def names(self) -> str:
        """The tiers beside the swap space; empty = there are none."""
        return ", ".join(type(tier).__name__ for tier in self._tiers)

    # --- at admission ---

    def on_arrive(self, request: Request) -> None:
        """The tier may look for its blocks."""
        for tier in self._tiers:
            tier.request_arrived(request)
        if self._tiers and PREFETCH in hinted_actions(request.message.sampling_params.extra_args):
            self._prefetch(request)
        elif self._tiers:
            self._arrived.append(request)

    def check(self, request: Request, plan: StepPlan) -> Blocked | None:
        """It waits while its blocks are being loaded, or those of a sibling that has a row: such a load may fail."""
        transfer_id = self._loading.get(request.handle)
        if transfer_id is not None and self._tier_of(transfer_id).is_overdue(request):
            del self._loading[request.handle]
            self._refused[request.handle] = MissReason.LOAD_FAILED
            if self._tier_of(transfer_id).fails_requests:
                self.lost.append(request.handle)
        if request.handle in self.lost:
            return Blocked(request.handle, WaitReason.WAITING_FOR_REMOTE_KVS, is_passed_over=True)
        group = request.message.fork_group
        loads = () if group is None else (one.request for one in self._in_flight.values() if one.fills_row)
        if request.handle not in self._loading and all(one.message.fork_group != group for one in loads):
            return None
        return Blocked(request.handle, WaitReason.WAITING_FOR_REMOTE_KVS, is_passed_over=True)

    def longer_prefix(self, request: Request, cached: CachedPrefix, plan: StepPlan) -> CachedPrefix:
        """`cached`, or what was loaded."""
        loaded = self._loaded.get(request.handle)
        return cached if loaded is None or loaded.num_tokens <= cached.num_tokens else loaded

    def get_num_new_matched_tokens(self, request: Request, prefix: CachedPrefix) -> ExternalHit | None:
        """What there is beyond a cached prefix; None = no more."""
        if self.swapping.keeps(request):
            return self.swapping.get_num_new_matched_tokens(request, prefix.num_tokens)
        if not self._tiers or not request.may_read_prefix_cache or prefix.partial_block_ids:
            return None
        if request.handle in self._refused or request.handle in self._loaded:
            return None
        self._kv.name_blocks(request, request.token_ids)
        for number in self._in_order(request):
            hit = self._tiers[number].get_num_new_matched_tokens(request, prefix.num_tokens)
            if hit is not None and hit.is_pending:
                self._is_pending = True
                return hit
            if hit is not None and (hit := self._limited(hit, request, prefix)) is not None:
                return dataclasses.replace(hit, tier=number) if number else hit
        return None

    def _in_order(self, request: Request) -> Iterable[int]:
        """The tiers from the first to be asked on: a connector for which the request has parameters comes first."""
        numbers = range(len(self._tiers))
        if len(numbers) > 1 and (request.message.sampling_params.extra_args or {}).get(KV_TRANSFER_PARAMS):
            return sorted(numbers, key=lambda number: not self._tiers[number].sends_messages)
        return numbers

    def _limited(self, hit: ExternalHit, request: Request, prefix: CachedPrefix) -> ExternalHit | None:
        """What of a hit can be used; None = no more than is cached."""
        num_blocks = min(hit.num_tokens, len(request.token_ids) - 1) // self._kv.block_size  # one token is computed
        num_tokens = num_blocks * self._kv.block_size
        return dataclasses.replace(hit, num_tokens=num_tokens) if num_tokens > prefix.num_tokens else None

    def _prefetch_waiting(self) -> None:
        """Requests that still wait after a step: tiers may bring their blocks nearer."""
        due, self._arrived = self._arrived[:MAX_PREFETCHED], self._arrived[MAX_PREFETCHED:]
        for request in due:
            is_waiting = request.row < 0 and request.status is RequestStatus.WAITING
            is_known = request.handle in self._loading or request.handle in self._loaded
            if is_waiting and not is_known:
                self._prefetch(request)

    def _prefetch(self, request: Request) -> None:
        if request.may_read_prefix_cache:
            num_computed = self._kv.get_computed_blocks(request).num_tokens
            self._kv.name_blocks(request, request.token_ids)
            for tier in self._tiers:
                tier.prefetch(request, num_computed)

    def explain_miss(self, request: Request, prefix: CachedPrefix, miss: CacheMiss | None) -> CacheMiss | None:
        """Why no more of a request that is placed was cached or loaded; `miss` is what the cache says.

        Of the block that is missing the cache says most where another one is there that differs.
        """
        if not self._tiers:
            return miss
        usable = (len(request.token_ids) - 1) // self._kv.block_size
        if prefix.num_tokens >= usable * self._kv.block_size:
            return miss
        if miss is None and prefix.is_loaded:
            miss = CacheMiss(MissReason.COLD, prefix.num_tokens)
        if miss is None or miss.reason not in TIERS_EXPLAIN:
            return miss
        reasons = [tier.explain_miss(request, prefix.num_tokens) for tier in self._tiers]
        found = self._refused.get(request.handle) or next((one for one in reasons if one is not None), None)
        if found is None or found not in TIERS_EXPLAIN[miss.reason]:
            return miss
        return dataclasses.replace(miss, reason=found, position=prefix.num_tokens)

    def begin_load(self, candidate: Candidate) -> Blocked:
        """Give blocks to an asynchronous load, for which its request waits."""
        request, hit = candidate.request, candidate.external
        assert hit is not None, "only what a tier has is loaded"
        blocks = self._kv.reserve(candidate.prefix, hit.num_tokens)
        self._tiers[hit.tier].update_state_after_alloc(request, candidate.prefix, hit, blocks.block_ids)
        self._loading[request.handle] = self._begin_load(candidate, blocks.block_ids, blocks)
        return Blocked(request.handle, WaitReason.WAITING_FOR_REMOTE_KVS, is_passed_over=True)

    def update_state_after_alloc(self, candidate: Candidate, block_ids: tuple[np.ndarray, ...]) -> None:
        """A candidate was placed on these blocks, per KV cache group."""
        request, hit = candidate.request, candidate.external
        if self.swapping.keeps(request):
            self.swapping.update_state_after_alloc(request, candidate.prefix, hit, block_ids)
        elif hit is not None:
            self._tiers[hit.tier].update_state_after_alloc(request, candidate.prefix, hit, block_ids)
            assert self._kv.keeps_sequence, "blocks of several groups are loaded before a request is placed"
            self._begin_load(candidate, (block_ids[0][: hit.num_tokens // self._kv.block_size],), None)

    def _begin_load(self, candidate: Candidate, block_ids: tuple[np.ndarray, ...], blocks: CachedPrefix | None) -> int:
        """Note a load into blocks that end, in each group, with the last one of what the tier has."""
        hit, names = candidate.external, candidate.request.block_hashes
        assert hit is not None, "only what a tier has is loaded"
        num_cached, end = (num // self._kv.block_size for num in (candidate.prefix.num_tokens, hit.num_tokens))
        keys, fresh_ids = list[bytes](), list[np.ndarray]()
        for group, ids in enumerate(block_ids):
            first = max(num_cached, end - len(ids))
            keys += [group_name(name, group) for name in names[first:end]]
            fresh_ids.append(ids[len(ids) - (end - first) :])
        transfer = BlockTransfer(
            self._num_transfers, tuple(keys), np.concatenate(fresh_ids), hit.is_async,
            time_limit_s=hit.time_limit_s, request_id=candidate.request.unique_id, tier=hit.tier,
        )  # fmt: skip
        self._loads.append(transfer)
        self._add(_InFlight(transfer, candidate.request, blocks))
        return transfer.transfer_id

    def _tier_of(self, transfer_id: int) -> KVTier:
        return self._tiers[self._in_flight[transfer_id].transfer.tier]

    def _add(self, started: _InFlight) -> None:
        self._in_flight[started.transfer.transfer_id] = started
        self._num_transfers += 1

    def on_place(self, request: Request) -> None:
        """Its row uses what was loaded."""
        self._let_go_loaded(request.handle)
        params = request.message.sampling_params
        is_early = not self._kv.keeps_sequence or SHARE in hinted_actions(params.extra_args)
        if self._tiers and not params.no_store and is_early:
            self._prompts[request.handle] = request

    def _let_go_loaded(self, handle: int) -> None:
        loaded = self._loaded.pop(handle, None)
        if loaded is not None:
            self._kv.unpin(loaded)

    # --- requests that end, or lose their row ---

    def on_end(self, request: Request) -> None:
        """What was loaded for it goes; what is being loaded goes when that is reported; what is saved, too."""
        self._let_go_loaded(request.handle)
        self._loading.pop(request.handle, None)
        self._prompts.pop(request.handle, None)
        self._refused.pop(request.handle, None)
        may_keep = request.status is not RequestStatus.FINISHED_ERROR and not request.message.sampling_params.no_store
        is_loading = any(one.fills_row and one.request is request for one in self._in_flight.values())
        if request.row >= 0 and may_keep and not is_loading and self._tiers:  # a load may still fail
            num_computed = int(self._table.num_computed_tokens[request.row])
            request.token_ids = np.array(self._table.token_ids[request.row, :num_computed])  # its row is about to go
            self._save(request)
        else:
            for tier in self._tiers:
                tier.request_left(request)

    def _save(self, request: Request, *, is_end: bool = True) -> None:
        """Save what tiers want of a request, which has a row; a connector's are saved at its end alone."""
        keys, block_ids = self._named_blocks(request)
        for number, tier in enumerate(self._tiers):
            if tier.sends_messages and not is_end:
                continue
            saved = tier.request_finished(request, keys, block_ids)
            if not saved:
                continue
            saved_ids = _select(keys, block_ids, saved)
            blocks = CachedPrefix((saved_ids,), 0)
            self._kv.pin(blocks)
            name = request.unique_id
            transfer = BlockTransfer(self._num_transfers, tuple(saved), saved_ids, request_id=name, tier=number)
            self._saves.append(transfer)
            self._add(_InFlight(transfer, request, blocks, is_save=True))

    def _named_blocks(self, request: Request) -> tuple[list[bytes], np.ndarray]:
        """Names and numbers of the full blocks of a request on a row, of all groups, in the order of its tokens."""
        num_computed = int(self._table.num_computed_tokens[request.row])
        names = self._kv.name_blocks(request, request.token_ids)
        by_group = self._kv.blocks_to_store(request.row, num_computed)
        numbers, groups = np.nonzero(by_group.T)
        places = zip(numbers.tolist(), groups.tolist(), strict=True)
        return [group_name(names[number], group) for number, group in places], by_group[groups, numbers]

    def _save_prompts(self) -> None:
        """Save blocks of prompts that are computed: of layers that free blocks few are there when the request ends."""
        for handle, request in list(self._prompts.items()):
            if request.row < 0:
                del self._prompts[handle]  # it lost its row, and comes again
            elif self._table.num_computed_tokens[request.row] >= request.num_prompt_tokens:
                del self._prompts[handle]
                self._save(request, is_end=False)

    def request_preempted(self, request: Request, plan: StepPlan) -> bool:
        """A request is about to lose its row: whether the swap space takes its blocks, so that it comes back first.

        Without swap space tiers that can copy at once keep what is computed, which is loaded as for any request.
        """
        if self.swapping.has_space:
            return self.swapping.request_preempted(request, plan)
        is_loading = any(one.fills_row and one.request is request for one in self._in_flight.values())
        if self._tiers and not is_loading and not request.message.sampling_params.no_store:
            keys, block_ids = self._named_blocks(request)
            for number, tier in enumerate(self._tiers):
                copied = tuple(tier.blocks_to_copy(request, keys))
                if copied:
                    ids, name = _select(keys, block_ids, copied), request.unique_id
                    self._saves.append(BlockTransfer(self._num_transfers, copied, ids, False, None, name, tier=number))
                    self._num_transfers += 1
        return False

    def keeps(self, request: Request) -> bool:
        """Whether a tier keeps blocks of a preempted request, which comes back before those that wait."""
        return self.swapping.keeps(request)

    def give_up(self, handle: int) -> None:
        """Forget the blocks of a preempted request, if a tier keeps any."""
        self.swapping.give_up(handle)

    def release_kept(self) -> bool:
        """Give up what was loaded, whose requests are then computed, and saves that were not sent.

        Not those of a connector: what it sends names their blocks.
        """
        saves = [one for one in self._saves if one.is_async and not self._tiers[one.tier].sends_messages]
        handles, num_saves = list(self._loaded), len(saves)
        for handle in handles:
            self._let_go_loaded(handle)
        self._refused.update(dict.fromkeys(handles, MissReason.EVICTED))
        for transfer in saves:
            self._end(transfer.transfer_id, is_done=False)
        self._saves = [one for one in self._saves if one.transfer_id in self._in_flight or not one.is_async]
        for tier in self._tiers if self._in_flight else ():
            tier.release_blocks()
        return bool(handles or num_saves)

    def pinned(self) -> list[CachedPrefix]:
        """Blocks of transfers, and those loaded."""
        in_flight = [one.blocks for one in self._in_flight.values() if one.blocks is not None]
        return [*in_flight, *self._loaded.values()]

    # --- messages ---

    def take_messages(self) -> tuple[SwapCopies, KVTransferMeta | None]:
        """What begins with the next message; given out once. None = no transfers."""
        copies = self.swapping.take_copies()
        self._is_pending = False
        if not self._loads and not self._saves:
            return copies, None
        meta = KVTransferMeta(tuple(self._loads), tuple(self._saves))
        self._loads, self._saves = [], []
        return copies, meta

    def attach_message(self, output: SchedulerOutput) -> SchedulerOutput:
        """A step with what the tier's other half has to know of it."""
        assert self._messenger is not None, "asked only where a tier sends messages"
        message = self._messenger.build_message(output, self._table.request_on, self._blocks_of_row)
        if message is None:
            return output
        transfers = dataclasses.replace(output.kv_transfers or KVTransferMeta(), connector=message)
        return dataclasses.replace(output, kv_transfers=transfers)

    def take_lost(self) -> list[int]:
        """`lost`, which is empty from then on."""
        lost, self.lost = self.lost, []
        return lost

    def add_params(self, finished: FinishedRequest) -> FinishedRequest:
        """The end of a request with what the tier has to say in its response."""
        params = None if self._messenger is None else self._messenger.take_params(finished.handle)
        return finished if params is None else dataclasses.replace(finished, kv_transfer_params=params)

    def counts(self, *, is_sent: bool) -> dict[str, Any]:
        """What `SchedulerStats` says of tiers.

        Args:
            is_sent: counts since the last call are among it.
        """
        if not self._tiers or not is_sent:
            return {"num_swapped": len(self.swapping)}
        counts = None if self._messenger is None else self._messenger.take_counts()
        stats = next((one for one in [tier.take_stats() for tier in self._tiers] if one is not None), None)
        return {"num_swapped": len(self.swapping), "offload": stats, "kv_connector": counts}

    def watch_blocks(self, recorder: KVEventRecorder) -> None:
        """Report to `recorder` which blocks can be found, in the cache and behind it."""
        self._kv.watch_blocks(recorder)
        self._recorder = recorder

    def _blocks_of_row(self, row: int) -> np.ndarray:
        return self._kv.get_block_ids(row)[0]

    def update_from_output(
        self, scheduled: SchedulerOutput, output: ModelRunnerOutput, seconds: float | None
    ) -> list[int]:
        """A step was executed: transfers end.

        Returns:
            Handles of requests that were placed on blocks whose load failed: what they computed means nothing.
        """
        self.swapping.update_from_output(scheduled, output, seconds)
        for tier in self._tiers:
            tier.update_from_output(scheduled, output, seconds)
        if self._prompts:
            self._save_prompts()
        if self._arrived:
            self._prefetch_waiting()
        if self._recorder is not None and self._messenger is not None:
            self._recorder.add(self._messenger.take_events())
        if not self._in_flight:
            return []
        meta, results = scheduled.kv_transfers, output.kv_transfers
        failed = () if results is None else results.failed
        done = () if results is None else results.done
        in_step = () if meta is None else tuple(one.transfer_id for one in meta.loads if not one.is_async)
        ended = [self._end(number, is_done=False) for number in failed]
        for number in (*done, *in_step):
            self._end(number, is_done=True)
        return [one.handle for one in ended if one is not None and one.blocks is None]

    def _end(self, transfer_id: int, *, is_done: bool) -> _InFlight | None:
        """A transfer has ended; None when it ended before."""
        ended = self._in_flight.pop(transfer_id, None)
        if ended is None:
            return None
        tier = self._tiers[ended.transfer.tier]
        tier.transfer_ended(ended.transfer.keys, is_save=ended.is_save, is_done=is_done)
        is_awaited = self._loading.get(ended.handle) == transfer_id
        if is_awaited:
            del self._loading[ended.handle]
        if not is_done and not ended.is_save:
            self._refused[ended.handle] = MissReason.LOAD_FAILED
            if tier.fails_requests and (is_awaited or ended.fills_row):
                self.lost.append(ended.handle)
        if is_awaited and is_done and ended.blocks is not None:
            self._loaded[ended.handle] = ended.blocks
        elif ended.blocks is not None:
            self._kv.unpin(ended.blocks)
        return ended

    def abandon(self, scheduled: SchedulerOutput) -> None:
        """A step failed. Its requests lost their rows; transfers that no row waits for are sent again.

        The worker may have begun these: it is given the same ids.
        """
        meta = scheduled.kv_transfers
        if meta is None:
            return
        for transfer in meta.loads:
            if not transfer.is_async:
                self._in_flight.pop(transfer.transfer_id, None)
        again = [dataclasses.replace(one, is_repeated=True) for one in meta.loads if one.transfer_id in self._in_flight]
        self._loads = [*again, *self._loads]
        again = [dataclasses.replace(one, is_repeated=True) for one in meta.saves if one.transfer_id in self._in_flight]
        self._saves = [*again, *self._saves]


def _select(keys: Sequence[bytes], block_ids: np.ndarray, chosen: Sequence[bytes]) -> np.ndarray:
    """Of [len(keys)] blocks those of some of the keys, in their order."""
    if len(chosen) == len(keys):
        return block_ids
    names = set(chosen)
    selected: np.ndarray = block_ids[[key in names for key in keys]]
    return selected
