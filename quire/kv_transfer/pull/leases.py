"""Leases: blocks that a prefill engine keeps for decode engines, until these have read them or the time is over.

Added by the worker's half of the connector, read by the server's threads. A lease that has ended never comes back, and
its blocks are freed only after that: what was read while it was held is what was computed.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Clock = Callable[[], float]

MAX_REMEMBERED = 4096
"""Ended leases that are known as such."""


@dataclass(slots=True)
class _Lease:
    names: Sequence[bytes]
    block_ids: Sequence[int]
    deadline: float


class Leases:
    """The leases of an engine.

    Args:
        lease_s: seconds that blocks are kept after they were last asked for.
        max_blocks: above which the oldest leases end early.
    """

    def __init__(self, lease_s: float, max_blocks: int, clock: Clock = time.monotonic) -> None:
        self._lease_s = lease_s
        self._max_blocks = max_blocks
        self._clock = clock
        self._held: OrderedDict[str, _Lease] = OrderedDict()
        self._ended: OrderedDict[str, None] = OrderedDict()
        self._unreported: set[str] = set()
        self._num_blocks = 0
        self._changed = threading.Condition()

    def __len__(self) -> int:
        return len(self._held)

    def add(self, request_id: str, names: Sequence[bytes], block_ids: Sequence[int]) -> None:
        """Keep blocks of a request."""
        with self._changed:
            self._held[request_id] = _Lease(names, block_ids, self._clock() + self._lease_s)
            self._num_blocks += len(block_ids)
            self._changed.notify_all()

    def block_ids(self, request_id: str, first: int, names: Sequence[bytes], wait_s: float = 0.0) -> list[int] | None:
        """The blocks from `first` on, if they have these names; None = they are not kept, or are others.

        Args:
            wait_s: longest wait for a lease that may be about to begin: a response may overtake its step.
        """
        with self._changed:
            self._wait_for(request_id, wait_s)
            lease = self._held.get(request_id)
            if lease is None or list(lease.names[first : first + len(names)]) != list(names):
                return None
            lease.deadline = self._clock() + self._lease_s
            return list(lease.block_ids[first : first + len(names)])

    def release(self, request_id: str, wait_s: float = 0.0) -> bool:
        """End a lease; whether it was held until now. Waits as `block_ids`."""
        with self._changed:
            self._wait_for(request_id, wait_s)
            return self._end(request_id)

    def expire(self) -> int:
        """End the leases whose time is over, and the oldest while there are too many blocks; how many."""
        with self._changed:
            now = self._clock()
            late = [request_id for request_id, lease in self._held.items() if lease.deadline <= now]
            for request_id in late:
                self._end(request_id)
            num_expired = len(late)
            while self._num_blocks > self._max_blocks:
                self._end(next(iter(self._held)))
                num_expired += 1
            return num_expired

    def take_ended(self) -> set[str]:
        """Requests whose leases have ended since the last call: their blocks may be freed."""
        with self._changed:
            ended, self._unreported = self._unreported, set()
            return ended

    def _wait_for(self, request_id: str, wait_s: float) -> None:
        self._changed.wait_for(lambda: request_id in self._held or request_id in self._ended, wait_s)

    def _end(self, request_id: str) -> bool:
        lease = self._held.pop(request_id, None)
        if lease is None:
            return False
        self._num_blocks -= len(lease.block_ids)
        self._unreported.add(request_id)
        self._ended[request_id] = None
        while len(self._ended) > MAX_REMEMBERED:
            self._ended.popitem(last=False)
        return True
