"""SchedulerSetup: all that a scheduler is made from, as plain data, and the one place where one is made.

Used by the engine, the flight recorder (which writes it down), replays and the simulator. No state.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from quire.config.cache import CacheConfig
from quire.config.scheduler import SchedulerConfig
from quire.core.kv_spec import KVCacheConfig
from quire.scheduler.admission import AdmissionGate
from quire.scheduler.scheduler import Scheduler


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSetup:
    """What a scheduler's decisions depend on, besides what it is told later.

    Attributes:
        scheduler: resolved: its limits are numbers.
        cache: prefix caching and watermark.
        kv_cache: number and size of pages.
        max_model_len: most tokens of a request, prompt and output.
    """

    scheduler: SchedulerConfig
    cache: CacheConfig
    kv_cache: KVCacheConfig
    max_model_len: int


def make_scheduler(
    setup: SchedulerSetup, clock: Callable[[], float] = time.monotonic, gates: Sequence[AdmissionGate] = ()
) -> Scheduler:
    """A scheduler that has seen nothing yet.

    Args:
        clock: seconds.
        gates: further reasons for which a waiting request must wait.

    Raises:
        ConfigError: a limit is missing, or the limits contradict each other.
    """
    return Scheduler(setup.scheduler, setup.cache, setup.kv_cache, setup.max_model_len, clock=clock, gates=gates)
