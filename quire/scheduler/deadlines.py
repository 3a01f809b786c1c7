"""QueueDeadlines: until when requests may wait for their first row.

Called by the scheduler. Owns the deadlines; a request that has started, or ended, keeps its entry until it is due.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

from quire.core.request import Request


class QueueDeadlines:
    """Requests by the time at which they give up waiting; false while there are none.

    Args:
        clock: seconds; read only for requests that have a deadline.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._heap: list[tuple[float, int, Request]] = []

    def __bool__(self) -> bool:
        return bool(self._heap)

    def add(self, request: Request) -> None:
        """A request arrives; it waits for its `queue_timeout_s`, if it has one."""
        if request.message.queue_timeout_s:
            deadline = self._clock() + request.message.queue_timeout_s
            heapq.heappush(self._heap, (deadline, request.handle, request))

    def take_overdue(self) -> list[Request]:
        """Requests whose time is over, the earliest first; each is returned once, whatever became of it."""
        if not self._heap:
            return []
        overdue, now = [], self._clock()
        while self._heap and self._heap[0][0] < now:
            overdue.append(heapq.heappop(self._heap)[2])
        return overdue
