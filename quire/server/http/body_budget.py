"""BodyBudget: how many bytes of request bodies are held at once, by all tenants and by one.

Used by the body reader. A body is paid for as it arrives, until its prompt was read. When the budget is spent, a body
of which nothing came for a while is given up for one that comes. Where there are several tenants, the long bodies of
one are received at a pace that leaves the event loop to the others. Owns the counts.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable

from quire.server.http.errors import UNAVAILABLE, ApiError

SMALL_BYTES = 1 << 16
STALLED_S = 2.0
UNPACED_BYTES = 1 << 18
LONG_BYTES_PER_S = 1 << 26
"""Of bodies longer than UNPACED_BYTES of one tenant: to receive 4 MB takes the event loop 10 ms."""


class BodyBudget:
    """The bytes of all bodies.

    Args:
        max_bytes: of all; the last eighth is for small bodies alone.
        has_several: whether there are several tenants: then one has at most half.
        clock: seconds.

    Attributes:
        num_bytes: that are held.
        num_bytes_ever: that were taken since the start.
    """

    def __init__(
        self, max_bytes: int, has_several: Callable[[], bool], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_bytes = max_bytes
        self._has_several = has_several
        self._clock = clock
        self._by_tenant: Counter[str] = Counter()
        self._paced_until: dict[str, float] = {}  # when a tenant's long bodies so far have arrived at their pace
        self._arriving: dict[BodyLease, None] = {}  # whose last bytes came longest ago comes first
        self.num_bytes = self.num_bytes_ever = 0

    def open(self, tenant: str) -> BodyLease:
        """The account of a body that begins to arrive."""
        lease = BodyLease(self, tenant)
        self._arriving[lease] = None
        lease.seen_s = self._clock()
        return lease

    def take(self, lease: BodyLease, num_bytes: int) -> None:
        """More of a body came.

        Raises:
            ApiError: there is no room for it.
        """
        while not self._has_room(lease, num_bytes):
            if not self._give_up_stalled(lease):
                raise no_room()
        self.num_bytes += num_bytes
        self.num_bytes_ever += num_bytes
        self._by_tenant[lease.tenant] += num_bytes
        lease.num_bytes += num_bytes
        lease.seen_s = self._clock()
        self._arriving.pop(lease, None)
        self._arriving[lease] = None

    def pause_s(self, lease: BodyLease, num_bytes: int) -> float:
        """Seconds until more of a body should be received, after `num_bytes` came."""
        if lease.num_bytes <= UNPACED_BYTES or not self._has_several():
            return 0.0
        now = self._clock()
        until = max(now, self._paced_until.get(lease.tenant, now)) + num_bytes / LONG_BYTES_PER_S
        self._paced_until[lease.tenant] = until
        return until - now

    def note_whole(self, lease: BodyLease) -> None:
        """All of a body is there."""
        self._arriving.pop(lease, None)

    def give_back(self, lease: BodyLease) -> None:
        """A body is no longer held; harmless when repeated."""
        self._arriving.pop(lease, None)
        self.num_bytes -= lease.num_bytes
        self._by_tenant[lease.tenant] -= lease.num_bytes
        if not self._by_tenant[lease.tenant]:
            del self._by_tenant[lease.tenant]
        lease.num_bytes = 0

    def _has_room(self, lease: BodyLease, num_bytes: int) -> bool:
        is_small = lease.num_bytes + num_bytes <= SMALL_BYTES
        most = self._max_bytes if is_small else self._max_bytes - self._max_bytes // 8
        return self._held() + num_bytes <= most and not self._is_over_share(lease.tenant, num_bytes)

    def _is_over_share(self, tenant: str, num_bytes: int) -> bool:
        return self._has_several() and self._held_by(tenant) + num_bytes > self._max_bytes // 2

    def _held(self) -> int:
        return self.num_bytes

    def _held_by(self, tenant: str) -> int:
        return self._by_tenant[tenant]

    def give_up_stalled(self) -> None:
        """Give up the bodies of which nothing came for a while, for others that have no room."""
        while self._give_up_stalled(None):
            pass

    def _give_up_stalled(self, newcomer: BodyLease | None) -> bool:
        """Give up the body of which nothing came for longest; False when there is none that would help."""
        own_alone = newcomer is not None and self._is_over_share(newcomer.tenant, 1)
        for lease in self._arriving:
            if self._clock() - lease.seen_s < STALLED_S:
                return False
            is_own = newcomer is not None and lease.tenant == newcomer.tenant
            if lease is not newcomer and lease.num_bytes and (is_own or not own_alone):
                self.give_back(lease)
                lease.give_up()
                return True
        return False


class BodyLease:
    """What one body takes of the budget.

    Attributes:
        num_bytes: held.
        is_given_up: others needed what it held.
        seen_s: when its last bytes came.
    """

    __slots__ = ("_budget", "_task", "is_given_up", "num_bytes", "seen_s", "tenant")

    def __init__(self, budget: BodyBudget, tenant: str) -> None:
        self._budget = budget
        self._task: asyncio.Task[object] | None = None
        self.tenant = tenant
        self.num_bytes = 0
        self.is_given_up = False
        self.seen_s = 0.0

    def receive_in(self, task: asyncio.Task[object] | None) -> None:
        """`task` waits for the body; it is cancelled when the body is given up."""
        self._task = task

    def take(self, num_bytes: int) -> None:
        """As `BodyBudget.take`."""
        self._budget.take(self, num_bytes)

    def note_whole(self) -> None:
        """As `BodyBudget.note_whole`."""
        self._task = None
        self._budget.note_whole(self)

    def give_up(self) -> None:
        """End the wait for the body."""
        self.is_given_up = True
        if self._task is not None:
            self._task.cancel()

    def close(self) -> None:
        """As `BodyBudget.give_back`."""
        self._budget.give_back(self)


def no_room() -> ApiError:
    """There is no room for a body."""
    return ApiError(
        UNAVAILABLE, "too many bytes of request bodies are being processed (max_bodies_bytes)", retry_after_s=1,
        reason="max_bodies_bytes",
    )  # fmt: skip
