"""Requests that wait for a row, in the order their policy serves them.

Called by the scheduler. Owns the waiting requests: those that have not run yet, and those preempted.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod

from quire.core.request import Request
from quire.errors import unknown_name


class RequestQueue(ABC):
    """Waiting requests. A policy decides the order; it sees each request when it is added."""

    @abstractmethod
    def add(self, request: Request) -> None:
        """Put a request in its place: newly arrived, preempted, or passed over in this step."""

    @abstractmethod
    def peek(self) -> Request:
        """The next request to serve; the queue must not be empty."""

    @abstractmethod
    def pop(self) -> Request:
        """Remove and return the next request to serve; the queue must not be empty."""

    @abstractmethod
    def remove(self, handle: int) -> Request | None:
        """Remove a request wherever it stands; None when it is not here."""

    @abstractmethod
    def __len__(self) -> int: ...


class FCFSQueue(RequestQueue):
    """First come, first served: by arrival. A preempted request returns to its old place.

    A heap of (arrival, handle); removed requests leave their entry behind until it reaches the top.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, int]] = []
        self._requests: dict[int, Request] = {}

    def add(self, request: Request) -> None:
        """Insert by arrival."""
        self._requests[request.handle] = request
        heapq.heappush(self._heap, (request.arrival, request.handle))

    def peek(self) -> Request:
        """The earliest arrived."""
        while self._heap[0][1] not in self._requests:
            heapq.heappop(self._heap)
        return self._requests[self._heap[0][1]]

    def pop(self) -> Request:
        """Remove and return the earliest arrived."""
        request = self.peek()
        heapq.heappop(self._heap)
        return self._requests.pop(request.handle)

    def remove(self, handle: int) -> Request | None:
        """Remove by handle; None when it is not here."""
        return self._requests.pop(handle, None)

    def __len__(self) -> int:
        return len(self._requests)


def make_request_queue(policy: str) -> RequestQueue:
    """The queue of a `scheduling_policy`.

    Raises:
        ConfigError: there is no such policy.
    """
    policies: dict[str, type[RequestQueue]] = {"fcfs": FCFSQueue}
    if policy not in policies:
        raise unknown_name("scheduling_policy", policy, policies)
    return policies[policy]()
