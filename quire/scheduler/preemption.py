"""Preemption: whom to stop when blocks run out, and what is kept of it.

Called by the scheduler. Stateless. The victim keeps its tokens. Their keys and values go to the swap space
(`scheduler.swapping`), or are computed again when it returns, except for blocks that are still in the prefix cache.
"""

from __future__ import annotations

import numpy as np

from quire.core.request import Request, RequestStatus
from quire.scheduler.request_table import RequestTable
from quire.scheduler.running import RunningRows
from quire.scheduler.scheduling_policy import SchedulingPolicy
from quire.scheduler.step_plan import StepPlan


def choose_victim(
    running: RunningRows, table: RequestTable, order: SchedulingPolicy, spared: np.ndarray | None = None
) -> int:
    """Row of the running request of the largest rank, resumed ones included; of its class, rather none of `spared`.

    The first in rank is never chosen while others run, so it advances, and every request ends (or see
    `would_lose_progress`).

    Args:
        spared: rows whose blocks came back from the swap space a moment ago.
    """
    last = running.last()
    if spared is None or last not in spared:
        return last
    others = running.rows[1:]
    others = others[~np.isin(others, spared)]
    if not len(others) or order.has_lower_priority(np.array([last]), table.request_on(int(others[-1]))).any():
        return last
    return int(others[-1])


def would_lose_progress(victim: int, running: RunningRows, table: RequestTable, plan: StepPlan) -> bool:
    """Whether steps in flight must be taken in before a row is preempted: the tokens that they sample for it are lost.

    That is no harm while the first in rank advances. It does not while it is held back, as a beam whose siblings find
    no room. Then each of the others must advance by a token at least whenever it is admitted, or none ever ends.
    """
    first = running.rows[:1]
    is_going_on = plan.num_tokens(first) + table.num_pending[first] > 0
    return bool(table.num_pending[victim] > 0 and not is_going_on.any())


def suspend(request: Request, table: RequestTable) -> None:
    """Keep what is needed to continue a request that is about to lose its row."""
    request.token_ids = table.tokens_of(request.row)
    request.num_computed_tokens = int(table.num_computed_tokens[request.row])
    request.status = RequestStatus.PREEMPTED
    request.num_preemptions += 1
