"""Requests that wait for a row, in the order in which they are served.

Called by the scheduler. Owns the waiting requests: those that have not run yet, and those preempted.
"""

from __future__ import annotations

import heapq

from quire.core.request import Request


class RequestQueue:
    """Waiting requests, the smallest rank first. A preempted request returns to its old place.

    A heap of (rank, handle); removed requests leave their entry behind until it reaches the top.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, int]] = []
        self._requests: dict[int, Request] = {}

    def add(self, request: Request) -> None:
        """Put a request in its place: newly arrived, preempted, or passed over in this step."""
        self._requests[request.handle] = request
        heapq.heappush(self._heap, (request.rank, request.handle))

    def peek(self) -> Request:
        """The next request to serve; the queue must not be empty."""
        while self._heap[0][1] not in self._requests:
            heapq.heappop(self._heap)
        return self._requests[self._heap[0][1]]

    def pop(self) -> Request:
        """Remove and return the next request to serve; the queue must not be empty."""
        request = self.peek()
        heapq.heappop(self._heap)
        return self._requests.pop(request.handle)

    def remove(self, handle: int) -> Request | None:
        """Remove a request wherever it stands; None when it is not here."""
        return self._requests.pop(handle, None)

    def handles(self) -> list[int]:
        """Who is here, in no order."""
        return list(self._requests)

    def __len__(self) -> int:
        return len(self._requests)
