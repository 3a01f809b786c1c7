"""Which waiting requests get a row in this step.

Called by the scheduler. Owns the queue of requests that come back from the swap space. There is one `check`, and its
refusal (`Blocked`) is the explanation that a replay shows. A feature that makes a request wait (a grammar that
compiles, an adapter that loads) adds an `AdmissionGate`.

    checked = admission.check(request, plan)      # Candidate(request, prefix of 32 tokens, 68 new tokens), or
                                                  # Blocked(handle, WaitReason.PAGES, num_missing=3)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

from quire.core.request import Request, RequestStatus
from quire.core.scheduler_output import NewRequestData
from quire.core.stats import EventKind
from quire.kv_cache.block_demand import PoolCounts, add_counts
from quire.kv_cache.manager import KVCacheManager
from quire.scheduler.budget import TokenCap, WantedTokens, apply_caps
from quire.scheduler.candidate import Candidate as Candidate
from quire.scheduler.kv_tiers import KVTiers
from quire.scheduler.outbox import Outbox
from quire.scheduler.request_group import RequestGroups
from quire.scheduler.request_table import RequestTable
from quire.scheduler.running import RunningRows, num_blocks_to_grow
from quire.scheduler.scheduling_policy import SchedulingPolicy, WaitingRequests
from quire.scheduler.step_plan import StepPlan
from quire.scheduler.swapping import COOLDOWN_STEPS
from quire.scheduler.waiting import Blocked, WaitReason


class GateDecision(Enum):
    """What a gate says of a waiting request."""

    GO = "go"
    SKIP = "skip this one in this step"
    STOP = "admit no other request in this step"


AdmissionGate = Callable[[Candidate, StepPlan], GateDecision]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionRules:
    """The settings that admission follows.

    Attributes:
        enable_chunked_prefill: a prompt may be computed in parts.
        reserve_full_prompt: admit only when blocks for the whole prompt are free and not needed by others' prompts.
        watermark_blocks, more_watermark_blocks: blocks left free when a request joins others, in the first pool and in
            those that follow.
        caps: bounds on the tokens of one request.
        gates: reasons to wait, asked in order.
    """

    enable_chunked_prefill: bool
    reserve_full_prompt: bool
    watermark_blocks: int
    caps: Sequence[TokenCap]
    gates: Sequence[AdmissionGate]
    more_watermark_blocks: PoolCounts = ()


class Admission:
    """Moves requests from queues to rows while rows, tokens and blocks last.

    Attributes:
        returning: preempted requests whose blocks are in the swap space. They come back before any that waits, unless
            that has higher priority: a return frees host blocks, and nothing is computed twice.
    """

    def __init__(
        self,
        rules: AdmissionRules,
        order: SchedulingPolicy,
        table: RequestTable,
        running: RunningRows,
        kv: KVCacheManager,
        outbox: Outbox,
        groups: RequestGroups,
        tiers: KVTiers,
    ) -> None:
        self._rules = rules
        self._order = order
        self._queue = order.queue
        self._table = table
        self._running = running
        self._kv = kv
        self._outbox = outbox
        self._groups = groups
        self._tiers = tiers
        self.returning = order.make_queue()
        self._no_blocks: PoolCounts = (0,) * len(kv.usable_counts)
        self._first_returning: Request | None = None  # that could not come back when it was tried last

    def admit(self, plan: StepPlan) -> None:
        """Place requests on rows and plan them: those that come back, then those that wait, each in their order.

        `plan.blocked` becomes the last refusal.
        """
        self._first_returning = None
        blocked = self._admit_from(self.returning, plan)
        if blocked is not None and not blocked.is_passed_over:
            self._first_returning = self.returning.peek()
        plan.blocked = self._admit_from(self._queue, plan) or blocked

    def remove(self, handle: int) -> None:
        """Forget a request without a row: it ends."""
        if self.returning.remove(handle) is None:
            self._queue.remove(handle)
        else:
            self._tiers.give_up(handle)

    def forget_kept(self, handles: Iterable[int]) -> None:
        """Those of these requests that were to come back with their blocks wait with their tokens alone."""
        for handle in handles:
            request = self.returning.remove(handle)
            if request is not None:
                self._tiers.give_up(handle)
                self._queue.add(request)

    def note_preemption(self, plan: StepPlan) -> None:
        """Nothing is admitted to a step that preempted requests for want of blocks."""
        queue = self._queue or self.returning
        if queue:
            plan.blocked = Blocked(queue.peek().handle, WaitReason.PREEMPTION)

    def _admit_from(self, queue: WaitingRequests, plan: StepPlan) -> Blocked | None:
        """Place requests up to the first that is refused and not passed over; that refusal, or the first one."""
        passed_over: list[Request] = []
        first_refusal = None
        while queue:
            request = queue.peek()
            # When nothing can enter, the blocks of its prompt are not even looked up.
            checked = self._check_step(request, plan) or self.check(request, plan)
            if isinstance(checked, Candidate) and checked.is_loaded_first:
                checked = self._tiers.begin_load(checked)
            if isinstance(checked, Candidate):
                queue.pop()
                self._place(checked, plan)
            elif checked.is_passed_over:
                passed_over.append(queue.pop())
                first_refusal = first_refusal or checked
            elif not (checked.num_missing and plan.is_empty and self._groups.release_kept()):
                first_refusal = checked
                break
        for request in passed_over:
            queue.add(request)
        return first_refusal

    def check(self, request: Request, plan: StepPlan) -> Candidate | Blocked:
        """A request without a row as it would be admitted to this step, or why it cannot be."""
        checked = self.check_turn(request, plan)
        if isinstance(checked, Blocked):
            return checked
        return self.check_room(checked, plan) or checked

    def check_turn(self, request: Request, plan: StepPlan) -> Candidate | Blocked:
        """As `check`, were there room for everything: whether others go first, and what gates say."""
        is_returning = self._tiers.keeps(request)
        if not is_returning:
            blocked = self._check_returning(request) or self._groups.check(request, plan)
            if blocked is not None:
                return blocked
        candidate = self.make_candidate(request, plan)
        if candidate.external is not None and candidate.external.is_pending:
            return Blocked(request.handle, WaitReason.WAITING_FOR_REMOTE_KVS, is_passed_over=True)
        blocked = self._check_gates(candidate, plan)
        if blocked is None and is_returning:
            blocked = self._check_stricter(request, plan)
        return candidate if blocked is None else blocked

    def check_room(self, candidate: Candidate, plan: StepPlan, *, beside_running: bool = False) -> Blocked | None:
        """Whether there are a row, tokens and blocks for a candidate; None = there are.

        Args:
            beside_running: as if all that runs computed in this step.
        """
        request = candidate.request
        blocked = self._check_step(request, plan)
        if blocked is not None:
            return blocked
        if not 0 < candidate.num_new_tokens <= min(plan.budget.num_left, plan.prompts.num_left):
            return Blocked(request.handle, WaitReason.TOKENS)
        num_lacking = self._num_lacking(candidate, plan, beside_running)
        if not num_lacking:
            return None
        reason = WaitReason.SWAPPED if self._tiers.keeps(request) else WaitReason.PAGES
        return Blocked(request.handle, reason, num_lacking)

    def _check_step(self, request: Request, plan: StepPlan) -> Blocked | None:
        """Whether the step has a row and a token left for anybody."""
        if not self._table.num_free_rows:
            return Blocked(request.handle, WaitReason.ROWS)
        if plan.budget.num_left <= 0:
            return Blocked(request.handle, WaitReason.TOKENS)
        if plan.prompts.num_left <= 0:
            return Blocked(request.handle, WaitReason.PACE)
        return None

    def _check_returning(self, waiting: Request) -> Blocked | None:
        """One that waits is behind a request that lacked room to come back, unless it has higher priority."""
        first = self._first_returning
        if first is None or not self._tiers.keeps(first) or self._order.has_higher_priority(waiting, first):
            return None
        return Blocked(first.handle, WaitReason.SWAPPED)

    def _check_stricter(self, returning: Request, plan: StepPlan) -> Blocked | None:
        """One that comes back lets the first that waits go before it, if that has higher priority and is not held."""
        if not self._queue:
            return None
        first = self._queue.peek()
        if self._order.has_higher_priority(first, returning) and isinstance(self.check_turn(first, plan), Candidate):
            return Blocked(returning.handle, WaitReason.OTHER)
        return None

    def _check_gates(self, candidate: Candidate, plan: StepPlan) -> Blocked | None:
        """The first verdict that is not to go, if there is one."""
        for gate in self._rules.gates:
            verdict = gate(candidate, plan)
            if verdict is not GateDecision.GO:
                is_passed_over = verdict is GateDecision.SKIP
                return Blocked(candidate.request.handle, WaitReason.GATE, is_passed_over=is_passed_over)
        return None

    def make_candidate(self, request: Request, plan: StepPlan) -> Candidate:
        """What a request without a row would compute in this step, were it admitted."""
        prefix = self._kv.get_computed_blocks(request)
        if not self._tiers.keeps(request):
            prefix = self._groups.longer_prefix(request, prefix, plan)
        request.num_found_tokens, request.num_common_tokens = prefix.num_tokens, prefix.num_common_tokens
        external = self._tiers.get_num_new_matched_tokens(request, prefix)
        start = prefix.num_tokens if external is None else external.num_tokens
        num_new_tokens = self._capped(request, start, len(request.token_ids) - start)
        if self._rules.enable_chunked_prefill:
            num_new_tokens = min(num_new_tokens, plan.budget.num_left, plan.prompts.num_left)
        return Candidate(request, prefix, num_new_tokens, external)

    def _capped(self, request: Request, start: int, num_tokens: int) -> int:
        if not self._rules.caps:
            return num_tokens
        wanted = WantedTokens(
            num_tokens=np.array([num_tokens]), starts=np.array([start]), request_of=lambda _: request,
            num_unfinished=len(self._running) + len(self._queue),
        )  # fmt: skip
        return int(apply_caps(self._rules.caps, wanted)[0])

    def _num_lacking(self, candidate: Candidate, plan: StepPlan, beside_running: bool) -> int:
        """Blocks that are lacking for a candidate, beside those that running rows may still take; 0 = it fits."""
        if self._tiers.keeps(candidate.request):
            num_tokens, num_reserved = self._room_to_return(candidate)
        else:
            others_running = not plan.is_empty and not self._groups.ignores_watermark(candidate.request)
            if beside_running:
                others_running = len(self._running) > 0
            num_tokens = candidate.num_computed_tokens + candidate.num_new_tokens
            if self._rules.reserve_full_prompt or candidate.is_loaded_first:
                num_tokens = len(candidate.request.token_ids)
            num_reserved, rules = self._num_promised(plan), self._rules
            if others_running:
                num_reserved = add_counts(num_reserved, (rules.watermark_blocks, *rules.more_watermark_blocks))
        demand = self._kv.demand(candidate.prefix, num_tokens, candidate.swapped)
        if candidate.is_loaded_first:
            demand = demand.at_least(self._kv.load_demand(candidate.prefix, candidate.num_computed_tokens))
        return demand.beside(num_reserved).lacking(self._kv.free_counts())

    def _room_to_return(self, candidate: Candidate) -> tuple[int, PoolCounts]:
        """Tokens that need blocks when a request comes back, and blocks to leave free: with others, for calm steps."""
        num_tokens = candidate.num_computed_tokens + candidate.num_new_tokens
        if not len(self._running):
            return num_tokens, self._no_blocks
        most = min(len(candidate.request.token_ids) + COOLDOWN_STEPS, self._table.max_model_len)
        return max(num_tokens, most), num_blocks_to_grow(self._running.rows, self._table, self._kv, COOLDOWN_STEPS)

    def _num_promised(self, plan: StepPlan) -> PoolCounts:
        """Blocks that running rows still need for the tokens they have, which no other request is given."""
        if not self._rules.reserve_full_prompt:
            return self._no_blocks
        if plan.num_promised is None:
            plan.num_promised = self._num_promised_to(self._running.rows)
        return plan.num_promised

    def _num_promised_to(self, rows: np.ndarray) -> PoolCounts:
        return self._kv.by_pool(self._kv.num_missing_blocks(rows, self._table.num_tokens[rows]))

    def _place(self, candidate: Candidate, plan: StepPlan) -> None:
        """Put a request, which is in no queue, on a free row and plan it; row, blocks and tokens must be there."""
        request, prefix, num_computed = candidate.request, candidate.prefix, candidate.num_computed_tokens
        cache_miss = None
        if candidate.external is None:
            cache_miss = self._tiers.explain_miss(request, prefix, self._kv.explain_miss(request, prefix))
        row = self._table.allocate(request, num_computed)
        block_ids = self._kv.place(row, request, prefix, num_computed + candidate.num_new_tokens, candidate.swapped)
        self._running.add(row)
        if request.num_cached_tokens < 0:
            request.num_cached_tokens = num_computed
            self._order.note_started(request, max(0, request.num_prompt_tokens - num_computed))
            num_loaded = prefix.num_unpublished * self._kv.block_size if prefix.is_loaded else 0
            plan.num_prefix_queries += request.num_prompt_tokens
            plan.num_prefix_hits += prefix.num_tokens - num_loaded
            if self._tiers.has_tiers:
                plan.num_external_queries += request.num_prompt_tokens - (prefix.num_tokens - num_loaded)
                plan.num_external_hits += num_computed - prefix.num_tokens + num_loaded
        request.status = RequestStatus.RUNNING
        self._outbox.note_event(request.handle, EventKind.SCHEDULED, request.num_cached_tokens, cache_miss)
        self._groups.on_place(request)
        plan.add_new(_new_request_data(request, row, block_ids), candidate.num_new_tokens)
        if plan.num_promised is not None:
            plan.num_promised = add_counts(plan.num_promised, self._num_promised_to(np.array([row])))
        self._tiers.update_state_after_alloc(candidate, block_ids)


def _new_request_data(request: Request, row: int, block_ids: tuple[np.ndarray, ...]) -> NewRequestData:
    message = request.message
    return NewRequestData(
        row=row,
        request_id=message.request_id,
        token_ids=request.token_ids,
        num_prompt_tokens=request.num_prompt_tokens,
        sampling_params=message.sampling_params,
        seed=message.seed,
        eos_token_id=message.eos_token_id,
        block_ids=block_ids,
    )
