"""Which waiting requests get a row in this step.

Called by the scheduler. Owns nothing: it moves requests from the queue to rows. A feature that makes a request
wait (a grammar that compiles, an adapter that loads) adds an `AdmissionGate`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

from quire.core.request import Request, RequestStatus
from quire.core.scheduler_output import NewRequestData
from quire.core.stats import EventKind
from quire.kv_cache.manager import CachedPrefix, KVCacheManager
from quire.kv_cache.swap_pool import SwappedPages
from quire.scheduler.budget import TokenCap, WantedTokens, apply_caps
from quire.scheduler.forks import ForkGroups
from quire.scheduler.outbox import Outbox
from quire.scheduler.request_table import RequestTable
from quire.scheduler.running import RunningRows
from quire.scheduler.service_order import ServiceOrder
from quire.scheduler.step_plan import StepPlan
from quire.scheduler.waiting import Hindrance, WaitReason


class Verdict(Enum):
    """What a gate says of a waiting request."""

    GO = "go"
    SKIP = "skip this one in this step"
    STOP = "admit nobody else in this step"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A waiting request as it would be admitted: what is cached of it, and how many tokens it would compute.

    `swapped` are its pages in the swap space, where these hold more of it than the cache.
    """

    request: Request
    prefix: CachedPrefix
    num_new_tokens: int
    swapped: SwappedPages | None = None

    @property
    def num_computed_tokens(self) -> int:
        """Tokens whose keys and values it would begin with."""
        return self.prefix.num_tokens if self.swapped is None else self.swapped.num_tokens


AdmissionGate = Callable[[Candidate, StepPlan], Verdict]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionRules:
    """The settings that admission follows.

    Attributes:
        enable_chunked_prefill: a prompt may be computed in parts.
        reserve_full_prompt: admit only when pages for the whole prompt are free and not needed by others' prompts.
        watermark_blocks: pages left free when a request joins others.
        caps: bounds on the tokens of one request.
        gates: reasons to wait, asked in order.
    """

    enable_chunked_prefill: bool
    reserve_full_prompt: bool
    watermark_blocks: int
    caps: Sequence[TokenCap]
    gates: Sequence[AdmissionGate]


class Admission:
    """Moves requests from the queue to rows while rows, tokens and pages last."""

    def __init__(
        self,
        rules: AdmissionRules,
        order: ServiceOrder,
        table: RequestTable,
        running: RunningRows,
        kv: KVCacheManager,
        outbox: Outbox,
        forks: ForkGroups,
    ) -> None:
        self._rules = rules
        self._order = order
        self._queue = order.queue
        self._table = table
        self._running = running
        self._kv = kv
        self._outbox = outbox
        self._forks = forks

    def admit_waiting(self, plan: StepPlan, is_behind: Callable[[Request], bool] = lambda request: False) -> None:
        """Place waiting requests on rows and plan them, in the order of the queue, up to the first that `is_behind`."""
        skipped, skips_beams = [], False
        num_promised = self._num_promised(self._running.rows) if self._queue else 0
        while self._queue and min(plan.budget.num_left, plan.prompts.num_left) > 0 and self._table.num_free_rows:
            waiting = self._queue.peek()
            if is_behind(waiting):
                break
            is_beam = waiting.message.sampling_params.beam_search is not None
            if self._forks.must_wait(waiting, plan) or (is_beam and skips_beams):
                skips_beams |= is_beam  # a search that overtook another could keep it from ever being whole
                skipped.append(self._queue.pop())
                continue
            candidate = self.make_candidate(waiting, plan)
            verdict = self._judge(candidate, plan, num_promised)
            if verdict is Verdict.STOP:
                if plan.is_empty and self._forks.release():
                    continue
                break
            request = self._queue.pop()
            if verdict is Verdict.SKIP:
                skipped.append(request)
                continue
            self.place(candidate, plan)
            num_promised += self._num_promised(np.array([candidate.request.row]))
        for request in skipped:
            self._queue.add(request)

    def could_admit(self, request: Request, plan: StepPlan) -> bool:
        """Whether there are a row and pages for a waiting request beside those that run."""
        if not self._table.num_free_rows:
            return False
        num_promised, has_company = self._num_promised(self._running.rows), len(self._running) > 0
        return not self._num_lacking(self.make_candidate(request, plan), num_promised, has_company)

    def may_admit(self, request: Request, plan: StepPlan) -> bool:
        """Whether no gate holds a waiting request back."""
        if self._forks.must_wait(request, plan):
            return False
        return self.ask_gates(self.make_candidate(request, plan), plan) is Verdict.GO

    def ask_gates(self, candidate: Candidate, plan: StepPlan) -> Verdict:
        """The first verdict that is not to go, if there is one."""
        for gate in self._rules.gates:
            verdict = gate(candidate, plan)
            if verdict is not Verdict.GO:
                return verdict
        return Verdict.GO

    def release_kept(self) -> bool:
        """Give up pages that are kept for requests that wait; False when there are none."""
        return self._forks.release()

    def make_candidate(self, request: Request, plan: StepPlan, swapped: SwappedPages | None = None) -> Candidate:
        """What a request without a row would compute in this step, were it admitted."""
        prefix, num_computed = self._kv.get_computed_blocks(request), 0
        if swapped is None:
            prefix = self._forks.longer_prefix(request, prefix, plan)
        elif swapped.num_tokens > prefix.num_tokens:
            num_computed = swapped.num_tokens
        start = max(prefix.num_tokens, num_computed)
        num_new_tokens = self._capped(request, start, len(request.token_ids) - start)
        if self._rules.enable_chunked_prefill:
            num_new_tokens = min(num_new_tokens, plan.budget.num_left, plan.prompts.num_left)
        return Candidate(request, prefix, num_new_tokens, swapped if num_computed else None)

    def _capped(self, request: Request, start: int, num_tokens: int) -> int:
        if not self._rules.caps:
            return num_tokens
        wanted = WantedTokens(
            num_tokens=np.array([num_tokens]), starts=np.array([start]), request_of=lambda _: request,
            num_unfinished=len(self._running) + len(self._queue),
        )  # fmt: skip
        return int(apply_caps(self._rules.caps, wanted)[0])

    def _judge(self, candidate: Candidate, plan: StepPlan, num_promised: int) -> Verdict:
        verdict = self.ask_gates(candidate, plan)
        if verdict is not Verdict.GO:
            return verdict
        if candidate.num_new_tokens > plan.budget.num_left:
            return Verdict.STOP
        has_company = not plan.is_empty and candidate.request.message.sampling_params.beam_search is None
        return Verdict.STOP if self._num_lacking(candidate, num_promised, has_company) else Verdict.GO

    def hindrance(self, plan: StepPlan) -> Hindrance:
        """What held up the first in the queue, which must not be empty, when this plan was made; asks no gate."""
        request = self._queue.peek()
        if not self._table.num_free_rows:
            return Hindrance(request.handle, WaitReason.ROWS)
        if plan.num_preemptions:
            return Hindrance(request.handle, WaitReason.PREEMPTION)
        if plan.budget.num_left <= 0:
            return Hindrance(request.handle, WaitReason.TOKENS)
        if plan.prompts.num_left <= 0:
            return Hindrance(request.handle, WaitReason.PACE)
        candidate = self.make_candidate(request, plan)
        num_missing = self._num_lacking(candidate, self._num_promised(self._running.rows), not plan.is_empty)
        if num_missing:
            return Hindrance(request.handle, WaitReason.PAGES, num_missing)
        is_whole = candidate.num_new_tokens <= plan.budget.num_left
        return Hindrance(request.handle, WaitReason.OTHER if is_whole else WaitReason.TOKENS)

    def _num_lacking(self, candidate: Candidate, num_promised: int, has_company: bool) -> int:
        """Pages that are lacking for a candidate, beside those promised to running rows; 0 = it fits."""
        num_tokens = candidate.prefix.num_tokens + candidate.num_new_tokens
        if self._rules.reserve_full_prompt:
            num_tokens = len(candidate.request.token_ids)
        num_reserved = num_promised + (self._rules.watermark_blocks if has_company else 0)
        return self._kv.demand(candidate.prefix, num_tokens).beside(num_reserved).lacking(self._kv.num_free_blocks)

    def _num_promised(self, rows: np.ndarray) -> int:
        """Pages that these rows still need for the tokens they have, which no other request is given."""
        if not self._rules.reserve_full_prompt:
            return 0
        return int(self._kv.num_missing_blocks(rows, self._table.num_tokens[rows]).sum())

    def place(self, candidate: Candidate, plan: StepPlan) -> tuple[np.ndarray, ...]:
        """Put a request, which is in no queue, on a free row and plan it; row, pages and tokens must be there.

        Returns:
            Per KV cache group: [num_blocks] int32, its pages.
        """
        request, prefix, num_computed = candidate.request, candidate.prefix, candidate.num_computed_tokens
        cache_miss = None if candidate.swapped is not None else self._kv.explain_miss(request, prefix)
        row = self._table.allocate(request, num_computed)
        block_ids = self._kv.place(row, request, prefix, num_computed + candidate.num_new_tokens, candidate.swapped)
        self._running.add(row)
        if request.num_cached_tokens < 0:
            request.num_cached_tokens = prefix.num_tokens
            self._order.note_started(request, max(0, request.num_prompt_tokens - prefix.num_tokens))
            plan.num_prefix_queries += request.num_prompt_tokens
            plan.num_prefix_hits += prefix.num_tokens
        request.status = RequestStatus.RUNNING
        self._outbox.note_event(request.handle, EventKind.SCHEDULED, request.num_cached_tokens, cache_miss)
        self._forks.note_placed(request)
        plan.add_new(_new_request_data(request, row, block_ids), candidate.num_new_tokens)
        return block_ids


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
