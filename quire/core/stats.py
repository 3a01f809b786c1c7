"""Records of what happened, returned by the code that counted. Totals and windows belong to the readers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from quire.core.cache_info import CacheMiss
from quire.core.draft_stats import DraftStats, merged_drafts


class EventKind(IntEnum):
    """Lifecycle events of a request's life inside the engine core."""

    QUEUED = 1
    SCHEDULED = 2
    PREEMPTED = 3
    PREFILLED = 4


@dataclass(frozen=True, slots=True)
class RequestEvent:
    """One lifecycle event.

    Attributes:
        timestamp: seconds on the engine's monotonic clock.
        num_cached_tokens: of SCHEDULED: prompt tokens found in the prefix cache at the first time. Of PREFILLED, which
            comes after a part of the prompt for requests with `return_progress`: prompt tokens that are computed.
        cache_miss: of SCHEDULED: why there were not more, this time; None = all that can be used was found.
    """

    handle: int
    kind: EventKind
    timestamp: float
    num_cached_tokens: int = 0
    cache_miss: CacheMiss | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadStats:
    """What a tier behind the KV cache has done in some time.

    Attributes:
        num_loaded, num_stored: blocks, the latter those that were written to the disk; `*_bytes`: their payloads.
        load_s, store_s: seconds that loads and stores took, each from its begin to its end.
        num_dropped: blocks that were not stored, as too many waited or the disk was not usable.
        num_evicted, num_evicted_from_host: blocks that were removed from the disk, and from host memory, to make room.
        num_prefetched: blocks that were read from the disk before they were asked for.
        num_kept_out: times that blocks were there and not loaded, as to compute them takes less time.
        faults: by kind, see `kv_offload.faults`.
    """

    num_loaded: int = 0
    num_stored: int = 0
    loaded_bytes: int = 0
    stored_bytes: int = 0
    load_s: float = 0.0
    store_s: float = 0.0
    num_dropped: int = 0
    num_evicted: int = 0
    num_evicted_from_host: int = 0
    num_prefetched: int = 0
    num_kept_out: int = 0
    faults: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerStats:
    """State of the control plane after one step; counts are of this step alone unless named total.

    Attributes:
        num_first_tokens: tokens sampled at the end of a prompt, which the step did not compute; all others sampled are
            among `num_scheduled_tokens`, as the tokens before them are.
        num_swap_preemptions: those of `num_preemptions` whose blocks went to the swap space.
        swapped_out_bytes, swapped_in_bytes: copied to the swap space and back.
        external_prefix_cache_queries, external_prefix_cache_hits: prompt tokens that the prefix cache had not, looked
            for and found in tiers behind it.
        kv_connector: what the KV connector did, by event; None = nothing.
        kv_event_batches_dropped: batches of KV events that were not sent, as too many waited.
        offload: of the tier behind the cache; None = there is none, or it did nothing.
        num_state_checkpoints, state_checkpoint_bytes: recurrent states that are kept for later requests.
    """

    step: int = 0
    num_running: int = 0
    num_waiting: int = 0
    num_scheduled_tokens: int = 0
    num_first_tokens: int = 0
    num_preemptions: int = 0
    num_swapped: int = 0
    num_swap_preemptions: int = 0
    swapped_out_bytes: int = 0
    swapped_in_bytes: int = 0
    kv_connector: dict[str, float] | None = None
    kv_cache_usage: float = 0.0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    external_prefix_cache_queries: int = 0
    external_prefix_cache_hits: int = 0
    kv_event_batches_dropped: int = 0
    num_state_checkpoints: int = 0
    state_checkpoint_bytes: int = 0
    offload: OffloadStats | None = None


@dataclass(slots=True)
class RequestStateStats:
    """Timings of one request; wall-clock arrival, other times in seconds on a monotonic clock (0 = not yet).

    Attributes:
        num_restarts: engine cores that it outlived.
        engine_index: the replica that it is with.
        output_ts: when its final output was made.
        drafts: what its drafts came to; None = it had none.
    """

    num_generation_tokens: int = 0
    num_preemptions: int = 0
    num_restarts: int = 0
    engine_index: int = 0
    arrival_time: float = 0.0
    queued_ts: float = 0.0
    scheduled_ts: float = 0.0
    first_token_ts: float = 0.0
    last_token_ts: float = 0.0
    output_ts: float = 0.0
    first_token_latency: float = 0.0
    drafts: DraftStats | None = None
    events: list[RequestEvent] = field(default_factory=list)


def merged_stats(parts: Sequence[RequestStateStats]) -> RequestStateStats:
    """Timings of several that belong together: from the first one's beginning to the last one's end."""
    if len(parts) == 1:
        return parts[0]
    return RequestStateStats(
        num_generation_tokens=sum(part.num_generation_tokens for part in parts),
        num_preemptions=sum(part.num_preemptions for part in parts),
        num_restarts=max((part.num_restarts for part in parts), default=0),
        engine_index=parts[0].engine_index if parts else 0,
        arrival_time=_earliest(part.arrival_time for part in parts),
        queued_ts=_earliest(part.queued_ts for part in parts),
        scheduled_ts=_earliest(part.scheduled_ts for part in parts),
        first_token_ts=_earliest(part.first_token_ts for part in parts),
        last_token_ts=max((part.last_token_ts for part in parts), default=0.0),
        output_ts=max((part.output_ts for part in parts), default=0.0),
        first_token_latency=_earliest(part.first_token_latency for part in parts),
        drafts=merged_drafts(part.drafts for part in parts),
        events=[event for part in parts for event in part.events],
    )


def _earliest(times: Iterable[float]) -> float:
    """The smallest of `times` that has happened (0 = not yet)."""
    return min((time for time in times if time), default=0.0)
