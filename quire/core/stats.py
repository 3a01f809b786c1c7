"""Records of what happened, returned by whoever counted. Totals and windows belong to the readers."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum


class EventKind(IntEnum):
    """Turning points of a request's life inside the engine core."""

    QUEUED = 1
    SCHEDULED = 2
    PREEMPTED = 3


@dataclass(frozen=True, slots=True)
class RequestEvent:
    """One turning point. `timestamp` is seconds on the engine's monotonic clock."""

    handle: int
    kind: EventKind
    timestamp: float
    num_cached_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerStats:
    """State of the control plane after one step; counts are of this step alone unless named total."""

    step: int = 0
    num_running: int = 0
    num_waiting: int = 0
    num_scheduled_tokens: int = 0
    num_preemptions: int = 0
    kv_cache_usage: float = 0.0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0


@dataclass(slots=True)
class RequestStateStats:
    """Timings of one request; wall-clock arrival, other times in seconds on a monotonic clock (0 = not yet)."""

    num_generation_tokens: int = 0
    num_preemptions: int = 0
    arrival_time: float = 0.0
    queued_ts: float = 0.0
    scheduled_ts: float = 0.0
    first_token_ts: float = 0.0
    last_token_ts: float = 0.0
    first_token_latency: float = 0.0
    events: list[RequestEvent] = field(default_factory=list)
