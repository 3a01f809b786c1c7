"""Preemption by recompute: whom to stop when pages run out, and what is kept of it.

Called by the scheduler. Stateless. The victim keeps its tokens and computes their keys and values again when
it returns, except for pages that are still in the prefix cache by then.
"""

from __future__ import annotations

from quire.core.request import Request, RequestStatus
from quire.scheduler.request_table import RequestTable
from quire.scheduler.running import RunningRows


def choose_victim(running: RunningRows) -> int:
    """Row of the running request of the largest rank, resumed ones included.

    The first in rank is never chosen while others run, so it always advances, and every request ends.
    """
    return running.last()


def suspend(request: Request, table: RequestTable) -> None:
    """Keep what is needed to continue a request that is about to lose its row."""
    request.token_ids = table.tokens_of(request.row)
    request.num_computed_tokens = int(table.num_computed_tokens[request.row])
    request.status = RequestStatus.PREEMPTED
    request.num_preemptions += 1
