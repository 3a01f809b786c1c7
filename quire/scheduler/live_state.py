"""The state of a scheduler at one moment, for people: who runs, who waits and why, who has which blocks.

Called by the engine core between two steps, when someone asks. Reads the scheduler's parts and changes nothing, so a
recording does not hold it, and a replay does not differ. Reasons are those that `quire replay` shows.
"""

from __future__ import annotations

import heapq
import time

import msgspec
import numpy as np

from quire.core.live_state import (
    MAX_QUEUED,
    MAX_ROWS,
    EngineState,
    ProcessState,
    QueuedRequest,
    RowState,
    TenantService,
)
from quire.core.request import Request
from quire.scheduler.fair_order import FairOrder
from quire.scheduler.scheduler import Scheduler
from quire.scheduler.waiting import Blocked, WaitReason
from quire.utils.process import read_own_usage

ARRIVED = ("arrived", "no step was planned since it arrived")


def live_state(scheduler: Scheduler, blocked: Blocked | None) -> EngineState:
    """The state of an engine core, of index 0.

    Args:
        blocked: the last refusal of admission; None = it refused none, or no step was planned yet.
    """
    start_s = time.thread_time()
    table, limits, tiers = scheduler._table, scheduler._limits, scheduler._tiers
    rows = scheduler._running.rows
    placed = rows[np.argsort(table.placement[rows])]
    blocks, prefixes, num_held = scheduler._kv.live_state(placed)
    num_blocks = dict(zip(placed.tolist(), num_held.tolist(), strict=True))
    swap_pools = tiers.swapping._pools
    state = EngineState(
        index=0, time_s=time.monotonic(), collect_s=0.0,
        num_running=len(rows), num_waiting=len(scheduler._order.queue), num_swapped=len(tiers.swapping),
        max_num_seqs=limits.max_num_seqs, max_num_batched_tokens=limits.max_num_batched_tokens,
        max_model_len=limits.max_model_len, block_size=scheduler._kv.block_size,
        batch=_batch(scheduler, rows[:MAX_ROWS], num_blocks), queue=_queue(scheduler, blocked),
        blocks=blocks, prefixes=prefixes, tenants=_tenants(scheduler),
        swap_blocks=sum(pool.num_blocks for pool in swap_pools),
        swap_blocks_used=sum(pool.num_blocks - pool.num_free_blocks for pool in swap_pools),
        tier=tiers.names,
        process=_process(),
    )  # fmt: skip
    return msgspec.structs.replace(state, collect_s=time.thread_time() - start_s)


def _process() -> ProcessState:
    usage = read_own_usage()
    return ProcessState(usage.pid, usage.rss_bytes, usage.cpu_s, usage.num_threads)


def _batch(scheduler: Scheduler, rows: np.ndarray, num_blocks: dict[int, int]) -> list[RowState]:
    """These rows, in the order in which they are served."""
    table, now = scheduler._table, time.time()
    columns = (table.num_prompt_tokens, table.num_computed_tokens, table.num_tokens, table.max_total_tokens)
    numbers = zip(
        rows.tolist(), table.is_prefill(rows).tolist(), *(column[rows].tolist() for column in columns), strict=True
    )
    batch = []
    for row, is_prefill, num_prompt, num_computed, num_tokens, max_total in numbers:
        request = table.request_on(row)
        batch.append(
            RowState(
                row=row, handle=request.handle, id=request.request_id, tenant=request.message.tenant,
                phase="prefill" if is_prefill else "decode", prompt_tokens=num_prompt, computed_tokens=num_computed,
                output_tokens=num_tokens - num_prompt, max_tokens=max_total,
                cached_tokens=max(0, request.num_cached_tokens),
                num_blocks=num_blocks[row],
                preemptions=request.num_preemptions, priority=request.message.priority,
                age_s=_seconds_since(request, now),
            )
        )  # fmt: skip
    return batch


def _queue(scheduler: Scheduler, blocked: Blocked | None) -> list[QueuedRequest]:
    """The first that wait: those that come back from the swap space, then the others, each in the order of service."""
    order, requests = scheduler._order, scheduler._requests
    places = order._counters.places() if isinstance(order, FairOrder) else None

    def place(request: Request) -> tuple[int, int]:
        return (0 if places is None else int(places[request.tenant_slot])), request.rank

    queued: list[QueuedRequest] = []
    now = time.time()
    first = None if blocked is None else requests.get(blocked.handle)
    for queue in (scheduler._admission.returning, order.queue):
        waiting = [requests[handle] for handle in queue.handles()]
        is_swapped = queue is not order.queue
        foremost = heapq.nsmallest(MAX_QUEUED - len(queued), waiting, key=place)
        queued += [_queued(request, is_swapped, blocked, first, now) for request in foremost]
    return queued


def _queued(
    request: Request, is_swapped: bool, blocked: Blocked | None, first: Request | None, now: float
) -> QueuedRequest:
    """A request without a row, and why: it was refused, or `first` was, which is served before it."""
    message = request.message
    phase = "swapped" if is_swapped else "preempted" if request.has_started else "waiting"
    reason, why = ARRIVED
    behind, num_missing = "", 0
    if blocked is not None and first is not None:
        reason, why, num_missing = blocked.reason.name.lower(), blocked.reason.value, blocked.num_missing
        behind = "" if first is request or blocked.is_passed_over else first.request_id
    elif is_swapped:
        reason, why = WaitReason.SWAPPED.name.lower(), WaitReason.SWAPPED.value
    return QueuedRequest(
        handle=request.handle, id=request.request_id, tenant=message.tenant, phase=phase,
        prompt_tokens=request.num_prompt_tokens, max_tokens=message.sampling_params.max_tokens,
        preemptions=request.num_preemptions, priority=message.priority, waited_s=_seconds_since(request, now),
        reason=reason, why=why, behind=behind, missing_blocks=num_missing,
    )  # fmt: skip


def _tenants(scheduler: Scheduler) -> list[TenantService]:
    """Tenants that the fair policy knows, the one that is next first."""
    order = scheduler._order
    if not isinstance(order, FairOrder):
        return []
    counters, table = order._counters, scheduler._table
    running = np.bincount(table.tenant_slot[scheduler._running.rows], minlength=len(counters.counters))
    least = min((float(counters.counters[slot]) for slot in counters._slots.values()), default=0.0)
    found = []
    for name, slot in sorted(counters._slots.items(), key=lambda one: counters.counters[one[1]])[:MAX_ROWS]:
        queue = order.queue._by_slot.get(slot)
        found.append(
            TenantService(
                name=name, weight=float(counters.weights[slot]), served=float(counters.counters[slot]) - least,
                running=int(running[slot]), waiting=0 if queue is None else len(queue),
            )
        )  # fmt: skip
    return found


def _seconds_since(request: Request, now: float) -> float:
    """Since it arrived, as the front end's clock had it; 0 where that is unknown."""
    arrived = request.message.arrival_time
    return max(0.0, now - arrived) if arrived else 0.0
