"""FairOrder: tenants share the engine by weight; the one served least is next. The scheduling policy `fair`.

Made by `make_scheduling_policy`. Owns the queues of tenants (each in the order of the tenant's own policy) and what
they were served (`virtual_counters`). Waiting and running requests are ordered alike: by tenant, then
within the tenant.

A tenant may have to give up rows: when the request that is next finds no row or no blocks, the tenants served more that
hold more than their share (of rows or of blocks, by weight, among those that have requests) are preempted down to it,
never below one row, as long as the tenant of the request stays within its own share, or has nothing running. What was
taken cannot be taken back before a request ends or another tenant comes or goes, so tenants do not preempt each
other in a loop.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from quire.core.request import Request
from quire.kv_cache.manager import KVCacheManager
from quire.scheduler.policy import ExpectedOutputs, Ranking
from quire.scheduler.request_queue import RequestQueue
from quire.scheduler.request_table import RequestTable
from quire.scheduler.running import RunningRows
from quire.scheduler.step_costs import StepCosts
from quire.scheduler.tenant_turns import TenantTurns
from quire.scheduler.virtual_counters import VirtualCounters


class TenantQueues:
    """Waiting requests, those of the tenant served least first. Finds it in time linear in the tenants that wait."""

    def __init__(self, counters: VirtualCounters) -> None:
        self._counters = counters
        self._by_slot: dict[int, RequestQueue] = {}
        self._slot_of: dict[int, int] = {}

    @property
    def waiting_slots(self) -> list[int]:
        """Tenants with waiting requests."""
        return list(self._by_slot)

    def add(self, request: Request) -> None:
        """As `RequestQueue`."""
        self._by_slot.setdefault(request.tenant_slot, RequestQueue()).add(request)
        self._slot_of[request.handle] = request.tenant_slot

    def peek(self) -> Request:
        """As `RequestQueue`."""
        return self._by_slot[self._counters.least(self.waiting_slots)].peek()

    def pop(self) -> Request:
        """As `RequestQueue`."""
        request = self.peek()
        self.remove(request.handle)
        return request

    def remove(self, handle: int) -> Request | None:
        """As `RequestQueue`."""
        slot = self._slot_of.pop(handle, None)
        if slot is None:
            return None
        queue = self._by_slot[slot]
        request = queue.remove(handle)
        if not queue:
            del self._by_slot[slot]
        return request

    def handles(self) -> list[int]:
        """Who is here, in no order."""
        return list(self._slot_of)

    def __len__(self) -> int:
        return len(self._slot_of)


class FairOrder:
    """As `SchedulingPolicy`.

    Args:
        rankings: by the name of a tenant's own policy.
        expected: how long answers become, for those rankings.
        table: of the running requests.
        kv: of the blocks that are shared.

    Attributes:
        service: what tenants were served.
    """

    def __init__(
        self, rankings: Mapping[str, Ranking], expected: ExpectedOutputs, table: RequestTable, kv: KVCacheManager
    ) -> None:
        self._rankings = rankings
        self._expected = expected
        self._table = table
        self._kv = kv
        self.service: VirtualCounters | None = VirtualCounters()
        self._counters = self.service
        self._turns = TenantTurns(table)
        self.queue = TenantQueues(self._counters)

    def enter(self, request: Request, arrival: int) -> None:
        """As `SchedulingPolicy`."""
        message = request.message
        request.rank = self._rankings[message.tenant_policy](request, arrival)
        slot = request.tenant_slot = self._counters.slot_of(message.tenant, message.tenant_weight)
        waiting = self.queue.waiting_slots
        if slot not in waiting:
            self._counters.lift(slot, waiting)

    def refresh(self, running: RunningRows) -> None:
        """As `SchedulingPolicy`."""
        rows = running.rows
        if len(rows) > 1:
            place = self._counters.places()[self._table.tenant_slot[rows]]
            running.arrange(rows[np.lexsort((self._table.rank[rows], place))])

    def has_lower_priority(self, rows: np.ndarray, waiting: Request) -> np.ndarray:
        """Those of tenants that were served more."""
        places = self._counters.places()
        lower_priority: np.ndarray = places[self._table.tenant_slot[rows]] > places[waiting.tenant_slot]
        return lower_priority

    def whose_prompts_wait(self, rows: np.ndarray, waiting: Request) -> np.ndarray:
        """Those of lower priority, but for what is left of short prompts within their tenants' shares."""
        left = self._table.num_left(rows)
        is_short = (left < len(waiting.token_ids)) & ~self._is_beyond(rows)[self._table.tenant_slot[rows]]
        waits: np.ndarray = self.has_lower_priority(rows, waiting) & ~is_short
        return waits

    def prompt_order(self, rows: np.ndarray) -> np.ndarray:
        """Tenants that hold no more than their share come first; of these, the one with the least left to compute.

        A prompt is charged when it begins, so by what they were served they would wait for those of a flood meanwhile.
        """
        owner = self._table.tenant_slot[rows]
        left = self._table.num_left(rows)
        left_of_tenant = np.bincount(owner, left, len(self._weights))
        order: np.ndarray = np.lexsort((left_of_tenant[owner], self._is_beyond(rows)[owner]))
        return order

    def may_outpace(self, decoding: np.ndarray, waiting: Request) -> bool:
        """Where all of them are of tenants that were served more and hold more than their share."""
        if not self.has_lower_priority(decoding, waiting).all():
            return False
        is_beyond = self._is_beyond(np.flatnonzero(self._table.handle >= 0))
        return bool(is_beyond[self._table.tenant_slot[decoding]].all())

    def share_step(self, rows: np.ndarray, num_wanted: np.ndarray, costs: StepCosts) -> int:
        """As `SchedulingPolicy`."""
        return self._turns.share_step(rows, num_wanted, self._weights, self.queue.waiting_slots, costs)

    def make_queue(self) -> TenantQueues:
        """As `SchedulingPolicy`."""
        return TenantQueues(self._counters)

    def has_higher_priority(self, one: Request, other: Request) -> bool:
        """Whether it is of a tenant that was served less."""
        slots = [one.tenant_slot, other.tenant_slot]
        return slots[0] != slots[1] and self._counters.least(slots) == slots[0]

    def may_preempt_others(self, waiting: Request) -> bool:
        """Whether its tenant stays within its share with it, or has nothing running."""
        held = np.flatnonzero(self._table.handle >= 0)
        own = held[self._table.tenant_slot[held] == waiting.tenant_slot]
        usage = self._usage(own, also_tokens=len(waiting.token_ids))
        return not len(own) or bool(usage[-1] <= self._shares(held)[waiting.tenant_slot])

    def preemptible(self, lower_priority: np.ndarray, waiting: Request) -> np.ndarray:
        """Rows beyond the shares of their tenants."""
        owner, share = self._table.tenant_slot, self._shares(np.flatnonzero(self._table.handle >= 0))
        is_beyond = np.zeros(len(lower_priority), dtype=np.bool_)
        for slot in np.unique(owner[lower_priority]).tolist():
            of_slot = np.flatnonzero(owner[lower_priority] == slot)
            is_beyond[of_slot] = self._usage(lower_priority[of_slot]) > share[slot]
            is_beyond[of_slot[0]] = False
        return lower_priority[is_beyond]

    def note_started(self, request: Request, num_prompt_tokens: int) -> None:
        """The prompt is charged."""
        self._counters.charge_prompt(request.tenant_slot, num_prompt_tokens)

    def note_sampled(self, rows: np.ndarray) -> None:
        """The tokens are charged."""
        if len(rows):
            self._counters.charge_outputs(self._table.tenant_slot[rows])

    def note_ended(self, request: Request, num_output_tokens: int, *, is_complete: bool) -> None:
        """As `SchedulingPolicy`."""
        self._counters.leave(request.tenant_slot)
        if is_complete:
            self._expected.note_answer(request.message.sampling_params, num_output_tokens)

    @property
    def _weights(self) -> np.ndarray:
        return self._counters.weights

    def _shares(self, rows: np.ndarray) -> np.ndarray:
        """[num_slots] share of each tenant among those of these rows, which are all that run, and of the queue."""
        slots = np.union1d(self._table.tenant_slot[rows], np.array(self.queue.waiting_slots, dtype=np.intp))
        shares: np.ndarray = self._weights / self._weights[slots].sum()
        return shares

    def _is_beyond(self, rows: np.ndarray) -> np.ndarray:
        """[num_slots] bool: tenants that hold more than their share, rows or blocks, of what all of `rows` hold."""
        owner, num_slots = self._table.tenant_slot[rows], len(self._weights)
        held = self._kv.num_blocks_held(self._table.num_tokens[rows])
        blocks = [
            np.bincount(owner, of_pool, num_slots) / usable
            for of_pool, usable in zip(held, self._kv.usable_counts, strict=True)
        ]
        num_rows = np.bincount(owner, minlength=num_slots)
        usage = np.maximum(
            num_rows / len(self._table.handle), blocks[0] if len(blocks) == 1 else np.max(blocks, axis=0)
        )
        is_beyond: np.ndarray = usage > self._shares(rows)
        return is_beyond

    def _usage(self, rows: np.ndarray, also_tokens: int = 0) -> np.ndarray:
        """Share of all rows or of all blocks, the larger, that these rows take: [n] of the first, the first two...

        Args:
            also_tokens: of one more request, which becomes the last.
        """
        num_tokens = self._table.num_tokens[rows]
        if also_tokens:
            num_tokens = np.append(num_tokens, also_tokens)
        blocks = np.cumsum(self._kv.num_blocks_held(num_tokens), axis=1) / np.array(self._kv.usable_counts)[:, None]
        usage: np.ndarray = np.maximum(np.arange(1, len(num_tokens) + 1) / len(self._table.handle), blocks.max(axis=0))
        return usage
