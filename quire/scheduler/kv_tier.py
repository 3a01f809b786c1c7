"""KVTier: a place behind the KV cache that holds keys and values, as the scheduler sees it.

Called by `KVTiers`, which owns what is in flight. A tier decides what it has of a request, and what it keeps of one.
The swap space (`swapping`) is the first; a disk or another machine implements the same calls, under the names of vLLM's
`KVConnectorBase_V1`. The worker's half is `worker.kv_tier`.

    hit = tier.get_num_new_matched_tokens(request, 32)   # ExternalHit(num_tokens=96): 64 more than the cache has
    # blocks are given out and the worker loads them; the request computes from token 96 on, or from 32 if that fails
    saved = tier.request_finished(request, keys)         # its blocks stay until the worker has saved those
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from quire.core.cache_info import MissReason
from quire.core.kv_events import KVEvent
from quire.core.kv_transfer import ConnectorMessage
from quire.core.request import Request
from quire.core.runner_output import ModelRunnerOutput
from quire.core.scheduler_output import NO_BLOCK_COPIES, BlockCopies, SchedulerOutput
from quire.core.stats import OffloadStats
from quire.kv_cache.cached_prefix import CachedPrefix
from quire.kv_cache.swap_pool import SwappedBlocks
from quire.scheduler.step_plan import StepPlan


@dataclass(frozen=True, slots=True)
class ExternalHit:
    """What a tier has of a request.

    Attributes:
        num_tokens: its first tokens, those in the cache included; whole blocks, unless it was swapped.
        is_async: the request waits, and holds up no other, until its blocks are loaded; False = they are loaded in the
            step that places it, before that computes.
        swapped: which blocks these are of a request that was swapped.
        time_limit_s: seconds after which the load is given up; None = there is no limit.
        is_pending: the tier does not know yet; the request waits and is asked for again.
        tier: number of the tier, where there are several; set by `KVTiers`.
    """

    num_tokens: int
    is_async: bool = False
    swapped: SwappedBlocks | None = None
    time_limit_s: float | None = None
    is_pending: bool = False
    tier: int = 0


class SwapCopies(NamedTuple):
    """The copies of one message between cache and swap space, and the handles of the requests that are copied out."""

    outs: BlockCopies = NO_BLOCK_COPIES
    ins: BlockCopies = NO_BLOCK_COPIES
    handles: tuple[int, ...] = ()


class KVTier:
    """One tier; a subclass overrides what it needs.

    Attributes:
        sends_messages: `build_message` is called for every step.
        fails_requests: a request whose load failed ends with an error, and is not computed instead.
        keeps_groups: blocks of several KV cache groups, and of groups that free blocks, are kept, each by the name that
            its group gives it (`kv_cache.stored_prefix`), and found together; loads are asynchronous.
    """

    sends_messages = False
    keeps_groups = False
    fails_requests = False

    @property
    def parts(self) -> Sequence[KVTier]:
        """The tiers that it is made of."""
        return (self,)

    # --- at admission ---

    def request_arrived(self, request: Request) -> None:
        """A request was queued."""

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> ExternalHit | None:
        """What is here of a request without a row, of which the cache has `num_computed_tokens`; None = no more.

        May be called again, with or without the request being placed in between.
        """
        return None

    def prefetch(self, request: Request, num_computed_tokens: int) -> None:
        """A request waits, of which the cache has `num_computed_tokens`; its blocks may be brought nearer meanwhile."""

    def explain_miss(self, request: Request, num_tokens: int) -> MissReason | None:
        """Why no more than the first `num_tokens` tokens of a request are loaded from here; None = not known."""
        return None

    def update_state_after_alloc(
        self, request: Request, prefix: CachedPrefix, hit: ExternalHit | None, block_ids: tuple[np.ndarray, ...]
    ) -> None:
        """A request of which blocks are here was given these blocks of the cache, per KV cache group.

        Args:
            prefix: what the cache had of it.
            hit: what is to be copied behind that; None = the cache had as much.
        """

    def is_overdue(self, request: Request) -> bool:
        """Whether a request should wait for its load no longer; the blocks stay until that is reported."""
        return False

    # --- at the end ---

    def request_finished(self, request: Request, keys: Sequence[bytes], block_ids: np.ndarray) -> Sequence[bytes]:
        """A request ends, or its prompt is computed; which of its full blocks are to be saved here.

        Args:
            keys: their names, in the order of its tokens; where `keeps_groups`, of every group.
            block_ids: [len(keys)] int32.

        Returns:
            Some of `keys`; empty = none. The blocks stay in the cache until the worker has saved them.
        """
        return ()

    def has_pending_work(self) -> bool:
        """Whether a message is to be sent even where nothing computes."""
        return False

    def take_params(self, handle: int) -> dict[str, Any] | None:
        """What the response of a request that has ended is to carry (`kv_transfer_params`); given out once."""
        return None

    def request_left(self, request: Request) -> None:
        """A request ends of which nothing may be kept, or which has no row."""

    def transfer_ended(self, keys: Sequence[bytes], *, is_save: bool, is_done: bool) -> None:
        """A transfer of these blocks was reported, be it by a failure."""

    def release_blocks(self) -> None:
        """Free blocks are short: saves under way should be reported with the next step, done or not."""

    # --- requests that are preempted ---

    def request_preempted(self, request: Request, plan: StepPlan) -> bool:
        """Whether the tier keeps the blocks of a request that is about to lose its row, so that it comes back first."""
        return False

    def blocks_to_copy(self, request: Request, keys: Sequence[bytes]) -> Sequence[bytes]:
        """A request is about to lose its row: which of its full blocks are to be copied here before the next step.

        Args:
            keys: as `request_finished`.

        Returns:
            Some of `keys`. The blocks are free at once, and nothing of the copy is reported.
        """
        return ()

    def keeps(self, request: Request) -> bool:
        """Whether blocks of a preempted request are here."""
        return False

    def give_up(self, handle: int) -> None:
        """Forget a preempted request's blocks, if there are any: it ends, or they may hold anything."""

    # --- messages ---

    def take_stats(self) -> OffloadStats | None:
        """What the tier has done since the last call; None = nothing that is counted."""
        return None

    def build_message(
        self, output: SchedulerOutput, request_on: Callable[[int], Request], block_ids_on: Callable[[int], np.ndarray]
    ) -> ConnectorMessage | None:
        """What goes to the worker's half with a step, where `sends_messages`; None = nothing.

        Args:
            request_on, block_ids_on: request and blocks of a row.
        """
        return None

    def take_counts(self) -> dict[str, float] | None:
        """Counts since the last call, by event, where `sends_messages`; None = nothing happened."""
        return None

    def take_events(self) -> Sequence[KVEvent]:
        """Blocks that can be found behind the cache, or no longer, since the last call, where `sends_messages`."""
        return ()

    def take_copies(self) -> SwapCopies:
        """The copies since the last message; called once for each message that is sent."""
        return SwapCopies()

    def update_from_output(self, scheduled: SchedulerOutput, output: ModelRunnerOutput, seconds: float | None) -> None:
        """A step was executed, in so many seconds; None = not measured."""
