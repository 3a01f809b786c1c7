"""FastBudget: the CPU time that each tenant's grammars may take at ordinary priority. Owned by the compile pool.

What a tenant takes beyond it waits in the slow queue, for what processors leave idle. Owns what was taken.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

BURST_S = 0.3
SHARE = 0.05
"""CPU time that a tenant may take at once (10 tries that fail, or 40 plain schemas), and the share of a core that it
may take for long."""


class FastBudget:
    """CPU time by tenant; safe to use from several threads.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._paid_at: dict[str, float] = {}  # when all that the tenant took will be refilled

    def is_spent(self, tenant: str) -> bool:
        """Whether `tenant` has taken more than it may."""
        with self._lock:
            return self._paid_at.get(tenant, 0.0) - self._clock() >= BURST_S / SHARE

    def charge(self, tenant: str, cpu_s: float) -> None:
        """A grammar of `tenant` took so much."""
        with self._lock:
            now = self._clock()
            self._paid_at[tenant] = max(now, self._paid_at.get(tenant, now)) + cpu_s / SHARE
