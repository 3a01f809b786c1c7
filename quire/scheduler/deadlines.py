"""QueueDeadlines: until when requests may wait for their first row.

Called by the scheduler. Owns the deadlines; a request that has started, or ended, keeps its entry until it is due.
"""

from __future__ import annotations

import heapq

from quire.core.request import Request


class QueueDeadlines:
    """Requests by the time at which they give up waiting; false while there are none."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Request]] = []

    def __bool__(self) -> bool:
        return bool(self._heap)

    def add(self, request: Request, deadline: float) -> None:
        """A request waits until `deadline`, in seconds of the scheduler's clock."""
        heapq.heappush(self._heap, (deadline, request.handle, request))

    def take_overdue(self, now: float) -> list[Request]:
        """Requests whose time is over, the earliest first; each is returned once, whatever became of it."""
        overdue = []
        while self._heap and self._heap[0][0] < now:
            overdue.append(heapq.heappop(self._heap)[2])
        return overdue
