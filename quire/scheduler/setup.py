"""SchedulerSetup: all that a scheduler is made from, as plain data, and the one place where one is made.

Used by the engine, the flight recorder (which writes it down), replays and the simulator. No state.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from quire.config.cache import CacheConfig
from quire.config.scheduler import SchedulerConfig
from quire.core.drafts import DraftController, DraftProposer
from quire.core.kv_spec import KVCacheConfig
from quire.plugins import SCHEDULER, load_plugin, unknown_choice
from quire.scheduler.admission import AdmissionGate
from quire.scheduler.interface import SchedulerInterface
from quire.scheduler.kv_tier import KVTier
from quire.scheduler.scheduler import Scheduler


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSetup:
    """What a scheduler's decisions depend on, besides what it is given later.

    Attributes:
        scheduler: resolved: its limits are numbers.
        cache: prefix caching and watermark.
        kv_cache: number and size of blocks.
        max_model_len: most tokens of a request, prompt and output.
        has_proposer: whether draft tokens are proposed.
        max_step_drafts: most of them in a step; None = `core.drafts.most_drafts`.
        max_steps_in_flight: steps that may be scheduled before the first of them is taken in.
        waits_for_tokens: the worker does not have a token before its step is taken in.
    """

    scheduler: SchedulerConfig
    cache: CacheConfig
    kv_cache: KVCacheConfig
    max_model_len: int
    has_proposer: bool = False
    max_step_drafts: int | None = None
    max_steps_in_flight: int = 1
    waits_for_tokens: bool = False


def make_scheduler(
    setup: SchedulerSetup,
    clock: Callable[[], float] = time.monotonic,
    gates: Sequence[AdmissionGate] = (),
    proposer: DraftProposer | None = None,
    tier: KVTier | None = None,
    controller: DraftController | None = None,
) -> Scheduler:
    """A scheduler that has seen nothing yet.

    Args:
        clock: seconds.
        gates: further reasons for which a waiting request must wait.
        proposer: of draft tokens; there is one if the setup says so.
        tier: where keys and values are kept beside the cache and the swap space; None = nowhere.
        controller: says how many drafts are verified; None = all that find room, as in a replay.

    Raises:
        ConfigError: a limit is missing, or the limits contradict each other.
    """
    make: Any = Scheduler if setup.scheduler.scheduler_cls is None else scheduler_class(setup.scheduler.scheduler_cls)
    assert setup.has_proposer == (proposer is not None), "a replay needs to know whether drafts were proposed"
    depth = setup.max_steps_in_flight
    more = {
        "proposer": proposer, "controller": controller, "max_step_drafts": setup.max_step_drafts, "tier": tier,
        "max_steps_in_flight": depth if depth > 1 else None, "waits_for_tokens": setup.waits_for_tokens or None,
    }  # fmt: skip
    more = {name: value for name, value in more.items() if value is not None}  # a plugin need not know of the others
    scheduler: Scheduler = make(
        setup.scheduler, setup.cache, setup.kv_cache, setup.max_model_len, clock=clock, gates=gates, **more
    )
    return scheduler


def scheduler_class(name: str) -> type[SchedulerInterface]:
    """The scheduler of a plugin, which is made as `Scheduler` is.

    Raises:
        ConfigError: there is none of this name, or it cannot be used.
    """
    found: type[SchedulerInterface] | None = load_plugin(SCHEDULER, name, SchedulerInterface)
    if found is None:
        raise unknown_choice(SCHEDULER, name, [])
    return found
