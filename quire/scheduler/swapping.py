"""Swapping: requests whose pages are in the swap space, until these come back.

Called by the scheduler. Owns the third queue beside waiting and running, the host pages, and the copies of the next
message. Host pages of a request that comes back are free at once: in a step nobody is swapped out after that, and the
worker copies out before it copies in.

A swapped request comes back before any waiting one, unless that is of a stricter class: it holds what others computed
for it, and its return frees host pages. Nothing depends on its pages: when they cannot be trusted, it is recomputed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from quire.core.request import Request
from quire.core.runner_output import ModelRunnerOutput
from quire.core.scheduler_output import NO_PAGE_COPIES, PageCopies, SchedulerOutput
from quire.kv_cache.block_pool import NULL_BLOCK_ID
from quire.kv_cache.manager import KVCacheManager
from quire.kv_cache.swap_pool import NO_HOST_BLOCK, SwappedPages, SwapPool
from quire.scheduler.admission import Admission, Candidate, Verdict
from quire.scheduler.request_table import RequestTable
from quire.scheduler.running import RunningRows
from quire.scheduler.service_order import ServiceOrder
from quire.scheduler.step_plan import StepPlan
from quire.scheduler.swap_costs import SwapCosts, is_swap_cheaper

# Steps that running rows must be able to grow by before a request comes back beside them, and for which it is not the
# next victim: less, and pages would travel to and fro without a token in between.
CALM_STEPS = 16


class SwapCopies(NamedTuple):
    """The copies of one message, and the handles of the requests that are copied out."""

    outs: PageCopies
    ins: PageCopies
    handles: tuple[int, ...]


class Swapping:
    """The swapped requests, and what moves between the cache and the swap space.

    Args:
        mode: "auto" weighs costs; "swap" swaps whatever has room; "recompute" nothing.
        num_blocks: pages of the swap space; 0 = there is none.
        page_size_bytes: of one page, all layers together.
        order: of the waiting requests, and of these.

    Attributes:
        blocker: the first swapped request that could not come back in the last step that admitted any.
    """

    def __init__(
        self,
        mode: str,
        num_blocks: int,
        page_size_bytes: int,
        kv: KVCacheManager,
        table: RequestTable,
        running: RunningRows,
        order: ServiceOrder,
        admission: Admission,
    ) -> None:
        self._pool = SwapPool(0 if mode == "recompute" else num_blocks)
        self._page_size_bytes = page_size_bytes
        self._kv = kv
        self._table = table
        self._running = running
        self._order = order
        self._waiting = order.queue
        self._admission = admission
        self._costs = SwapCosts() if mode == "auto" and self._pool.num_blocks else None
        self._swapped = order.make_queue()
        self._pages: dict[int, SwappedPages] = {}
        self.blocker: Request | None = None
        self._outs: dict[int, PageCopies] = {}
        self._ins: list[PageCopies] = []
        self._returned: dict[int, int] = {}
        self._num_steps = 0

    def __len__(self) -> int:
        return len(self._swapped)

    # --- out ---

    def try_swap_out(self, request: Request, plan: StepPlan) -> bool:
        """Take in a request that is about to lose its row, if its pages have room here and are worth it."""
        num_tokens = int(self._table.num_computed_tokens[request.row])
        if not num_tokens or not self._pool.num_free_blocks:
            return False
        num_blocks = -(-num_tokens // self._kv.block_size)
        block_ids = [ids[:num_blocks] for ids in self._kv.get_block_ids(request.row)]
        num_held = sum(int(np.count_nonzero(ids != NULL_BLOCK_ID)) for ids in block_ids)
        if num_held > self._pool.num_free_blocks or not self._is_worth_it(request, num_tokens, num_held):
            return False
        host_block_ids = self._pool.take(num_held)
        pages = SwappedPages(num_tokens, _spread(host_block_ids, block_ids))
        device_block_ids = np.concatenate(block_ids)
        self._outs[request.handle] = PageCopies(device_block_ids[device_block_ids != NULL_BLOCK_ID], host_block_ids)
        self._pages[request.handle] = pages
        self._swapped.add(request)
        plan.num_swap_preemptions += 1
        return True

    def _is_worth_it(self, request: Request, num_tokens: int, num_held: int) -> bool:
        if self._costs is None:
            return True
        num_kept = min(num_tokens, self._kv.num_kept_tokens(request, self._is_room_ample()))
        swap_s = self._costs.estimate_swap_s(num_held, max(0, num_held - num_kept // self._kv.block_size))
        return is_swap_cheaper(swap_s, self._costs.estimate_recompute_s(num_kept, num_tokens))

    def _is_room_ample(self) -> bool:
        """Whether free pages, before the victim's, will do for the rows that run and for the first that waits."""
        num_first = int(self._kv.num_blocks_held(np.array(len(self._waiting.peek().token_ids)))) if self._waiting else 0
        return self._num_blocks_to_grow() + num_first <= self._kv.num_free_blocks

    def _num_blocks_to_grow(self) -> int:
        """Pages that the running rows lack for `CALM_STEPS` steps."""
        rows = self._running.rows
        grown = np.minimum(self._table.num_tokens[rows] + CALM_STEPS, self._table.max_total_tokens[rows])
        return int(self._kv.num_missing_blocks(rows, grown).sum())

    # --- back ---

    def bring_back(self, plan: StepPlan) -> None:
        """Place swapped requests on rows and plan them, in the order of rank; who preempts comes first."""
        self.blocker = None
        held_back = []
        while self._swapped:
            request = self._swapped.peek()
            candidate = self._admission.make_candidate(request, plan, self._pages[request.handle])
            verdict = self._admission.ask_gates(candidate, plan)
            if verdict is Verdict.GO and not self._is_behind_waiting(request, plan):
                is_placeable = self._fits(candidate, plan)
                if not is_placeable and plan.is_empty and self._admission.release_kept():
                    continue
            else:
                is_placeable = False
            if verdict is not Verdict.SKIP and not is_placeable:
                self.blocker = request
                break
            self._swapped.pop()
            if verdict is Verdict.SKIP:
                held_back.append(request)
            else:
                self._place(candidate, plan)
        for request in held_back:
            self._swapped.add(request)

    def is_ahead_of(self, waiting: Request) -> bool:
        """Whether a swapped request that lacked room in the last step comes before this waiting one."""
        blocker = self.blocker
        return blocker is not None and blocker.handle in self._pages and not self._order.is_stricter(waiting, blocker)

    def _is_behind_waiting(self, request: Request, plan: StepPlan) -> bool:
        if not self._waiting:
            return False
        first = self._waiting.peek()
        return self._order.is_stricter(first, request) and self._admission.may_admit(first, plan)

    def _fits(self, candidate: Candidate, plan: StepPlan) -> bool:
        """Row, tokens and pages; beside others also pages for `CALM_STEPS` steps of all of them."""
        num_new_tokens = candidate.num_new_tokens
        if not self._table.num_free_rows or not 0 < num_new_tokens <= min(plan.budget.num_left, plan.prompts.num_left):
            return False
        num_tokens, num_reserved = candidate.num_computed_tokens + num_new_tokens, 0
        if len(self._running):
            num_reserved = self._num_blocks_to_grow()
            num_tokens = max(num_tokens, min(len(candidate.request.token_ids) + CALM_STEPS, self._table.max_model_len))
        demand = self._kv.demand(candidate.prefix, num_tokens, candidate.swapped).beside(num_reserved)
        return not demand.lacking(self._kv.num_free_blocks)

    def _place(self, candidate: Candidate, plan: StepPlan) -> None:
        handle = candidate.request.handle
        pages = self._pages.pop(handle)
        block_ids = self._admission.place(candidate, plan)
        if candidate.swapped is not None:
            for host_ids, placed in zip(pages.host_block_ids, block_ids, strict=True):
                self._ins.append(self._copies_back(candidate, host_ids, placed[: len(host_ids)]))
        self._pool.free(pages.held())
        self._returned[handle] = self._num_steps

    def _copies_back(self, candidate: Candidate, host_ids: np.ndarray, placed: np.ndarray) -> PageCopies:
        """From the host pages of one group to the pages that were placed for them, shared ones left out."""
        is_copied = (host_ids != NO_HOST_BLOCK) & ~np.isin(placed, self._kv.shared_on_restore(candidate.prefix))
        return PageCopies(host_ids[is_copied], placed[is_copied])

    def rows_to_spare(self) -> np.ndarray | None:
        """Running rows that came back less than `CALM_STEPS` steps ago; None when there are none."""
        if not self._returned:
            return None
        oldest = self._num_steps - CALM_STEPS
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

    def confirm(self, scheduled: SchedulerOutput, output: ModelRunnerOutput, seconds: float | None) -> None:
        """A step was executed, in so many seconds; None = not measured."""
        if self._costs is not None:
            self._costs.record(scheduled, output, seconds)

    def abandon(self, handles: Iterable[int]) -> list[Request]:
        """The step failed in which these were swapped out, whose host pages may hold anything: they are given up."""
        return [request for handle in handles if (request := self.remove(handle)) is not None]

    def remove(self, handle: int) -> Request | None:
        """Forget a request; None when it is not here."""
        request = self._swapped.remove(handle)
        if request is not None:
            self._pool.free(self._pages.pop(handle).held())
            self._outs.pop(handle, None)
        return request

    def take_all(self) -> list[Request]:
        """Every swapped request, between two steps; its pages are given up."""
        return [request for handle in list(self._pages) if (request := self.remove(handle)) is not None]

    def num_bytes(self, copies: PageCopies) -> int:
        """Bytes that these copies move."""
        return len(copies) * self._page_size_bytes


def _spread(host_block_ids: np.ndarray, block_ids: list[np.ndarray]) -> tuple[np.ndarray, ...]:
    """The host pages laid out as the pages that they stand for, per group; -1 for null pages."""
    spread, start = [], 0
    for ids in block_ids:
        is_held = ids != NULL_BLOCK_ID
        host_ids = np.full(len(ids), NO_HOST_BLOCK, dtype=np.int32)
        end = start + int(np.count_nonzero(is_held))
        host_ids[is_held] = host_block_ids[start:end]
        spread.append(host_ids)
        start = end
    return tuple(spread)


def _concatenate(copies: list[PageCopies]) -> PageCopies:
    if not copies:
        return NO_PAGE_COPIES
    return PageCopies(
        np.concatenate([one.source_ids for one in copies]), np.concatenate([one.target_ids for one in copies])
    )
