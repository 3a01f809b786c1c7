"""Whether the client itself was what limited a run: its event loop, its share of CPU, its open files.

Called by `load` and by the command. A run that the client limited says nothing about the server.
"""

from __future__ import annotations

import asyncio
import math
import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from quire.bench.records import ClientHealth, RequestRecord

PROBE_S = 0.005
RESERVED_FILES = 64
MIN_RATE_SHARE = 0.95


@dataclass(frozen=True, slots=True)
class ClientLimits:
    """Up to where a client's figures are its server's.

    Attributes:
        max_lag_ms: p99 of the event loop's lateness, and of the lateness of dispatched requests.
        max_cpu_share: CPU seconds per second of one client process.
    """

    max_lag_ms: float = 20.0
    max_cpu_share: float = 0.9

    def exceeded_by(self, health: ClientHealth) -> list[str]:
        """Why the client was the limit, a sentence for each reason; empty = it was not."""
        reasons = []
        if health.lag_p99_ms > self.max_lag_ms:
            reasons.append(
                f"the client's event loop ran {health.lag_p99_ms:.1f} ms late (p99; limit {self.max_lag_ms:g} ms)"
            )
        if health.cpu_share > self.max_cpu_share:
            reasons.append(f"a client process used {health.cpu_share:.0%} of a CPU (limit {self.max_cpu_share:.0%})")
        if health.rate_share is not None:
            # In a run of milliseconds, one tick of a timer is a large share.
            if health.rate_share < MIN_RATE_SHARE and health.dispatch_max_ms > self.max_lag_ms:
                reasons.append(f"the client reached {health.rate_share:.0%} of the requested request rate")
            if health.dispatch_p99_ms > self.max_lag_ms:
                reasons.append(
                    f"the client sent requests {health.dispatch_p99_ms:.1f} ms late (p99; limit {self.max_lag_ms:g} ms)"
                )
        if health.num_local_errors:
            reasons.append(f"{health.num_local_errors} connections failed: the client ran out of open files or ports")
        return reasons


class LagProbe:
    """Measures by how much an event loop is late, on a fixed schedule: every tick that a held loop misses counts.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.lags_s: list[float] = []

    async def run(self) -> None:
        """Probe until cancelled."""
        due = self._clock() + PROBE_S
        while True:
            await asyncio.sleep(max(0.0, due - self._clock()))
            due = self.note(due)

    def note(self, due: float) -> float:
        """A tick that was due at `due` has come; returns when the next one is due."""
        now = self._clock()
        while due <= now:
            self.lags_s.append(now - due)
            due += PROBE_S
        return due


def measure_health(
    records: Sequence[RequestRecord], lags_s: Sequence[float], *, cpu_s: float, wall_s: float, has_rate: bool
) -> ClientHealth:
    """What a client process says of itself."""
    lags = sorted(lags_s)
    delays = sorted(max(0.0, record.dispatched_s - record.due_s) for record in records)
    rate_share = None
    if has_rate and len(records) > 1:
        first = min(record.due_s for record in records)
        asked_s = max(record.due_s for record in records) - first
        taken_s = max(record.dispatched_s for record in records) - first
        rate_share = min(1.0, asked_s / taken_s) if taken_s > 0 else 1.0
    return ClientHealth(
        cpu_share=cpu_s / wall_s if wall_s > 0 else 0.0,
        lag_p50_ms=1e3 * at_share(lags, 0.5),
        lag_p99_ms=1e3 * at_share(lags, 0.99),
        lag_max_ms=1e3 * at_share(lags, 1.0),
        dispatch_p99_ms=1e3 * at_share(delays, 0.99),
        dispatch_max_ms=1e3 * at_share(delays, 1.0),
        rate_share=rate_share,
        num_local_errors=sum(record.failure is not None and record.failure.is_local for record in records),
    )


def worst_of(healths: Sequence[ClientHealth]) -> ClientHealth:
    """Of several client processes; local errors are summed."""
    rates = [health.rate_share for health in healths if health.rate_share is not None]
    return ClientHealth(
        cpu_share=max(health.cpu_share for health in healths),
        lag_p50_ms=max(health.lag_p50_ms for health in healths),
        lag_p99_ms=max(health.lag_p99_ms for health in healths),
        lag_max_ms=max(health.lag_max_ms for health in healths),
        dispatch_p99_ms=max(health.dispatch_p99_ms for health in healths),
        dispatch_max_ms=max(health.dispatch_max_ms for health in healths),
        rate_share=min(rates, default=None),
        num_local_errors=sum(health.num_local_errors for health in healths),
    )


def at_share(ordered: Sequence[float], share: float) -> float:
    """The value that `share` of the values do not exceed (nearest rank); 0 of none."""
    return ordered[max(0, math.ceil(len(ordered) * share) - 1)] if ordered else 0.0


def missing_files(num_connections: int) -> int:
    """How many open files are missing for `num_connections`, after raising this process's limit as far as it goes."""
    wanted = num_connections + RESERVED_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return 0 if soft == resource.RLIM_INFINITY else max(0, wanted - soft)
