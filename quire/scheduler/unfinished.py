"""UnfinishedRequests: every request from its arrival to its end, by handle.

Called by the scheduler. Owns them, how many have arrived, and until when they may wait for their first row.
"""

from __future__ import annotations

from collections.abc import Callable

from quire.core.request import Request
from quire.scheduler.deadlines import QueueDeadlines


class UnfinishedRequests:
    """Requests in the order of their arrival.

    Args:
        clock: seconds; read only for requests that have a deadline.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._by_handle: dict[int, Request] = {}
        self._num_arrived = 0
        self._deadlines = QueueDeadlines(clock)

    def __len__(self) -> int:
        return len(self._by_handle)

    def __contains__(self, handle: int) -> bool:
        return handle in self._by_handle

    def __getitem__(self, handle: int) -> Request:
        return self._by_handle[handle]

    def get(self, handle: int) -> Request | None:
        """The request of a handle; None when it is unknown or has ended."""
        return self._by_handle.get(handle)

    def add(self, request: Request) -> None:
        """A request has arrived."""
        self._by_handle[request.handle] = request
        self._num_arrived += 1
        self._deadlines.add(request)

    def remove(self, request: Request) -> None:
        """A request ends."""
        del self._by_handle[request.handle]

    @property
    def num_arrived(self) -> int:
        """Requests that have ever arrived."""
        return self._num_arrived

    def all(self) -> list[Request]:
        """The earliest arrival first."""
        return list(self._by_handle.values())

    def take_overdue(self) -> list[Request]:
        """Unfinished requests whose queue timeout is over; each is returned once, whether or not it has a row."""
        return [request for request in self._deadlines.take_overdue() if request.handle in self._by_handle]
