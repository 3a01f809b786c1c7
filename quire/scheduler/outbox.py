"""Events that were not yet sent to the front end: lifecycle events and ends of requests.

Written by the scheduler, emptied into the next `EngineCoreOutputs`, so each is reported once.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from quire.core.cache_info import CacheMiss
from quire.core.draft_stats import DraftOutcomes
from quire.core.engine_messages import EngineCoreOutputs, FinishedRequest
from quire.core.logprobs import LogprobsArrays
from quire.core.stats import EventKind, RequestEvent, SchedulerStats


class Outbox:
    """Events and ends since the last message."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._events: list[RequestEvent] = []
        self._finished: list[FinishedRequest] = []

    def __bool__(self) -> bool:
        return bool(self._events or self._finished)

    def note_event(
        self, handle: int, kind: EventKind, num_cached_tokens: int = 0, cache_miss: CacheMiss | None = None
    ) -> None:
        """A request was queued, scheduled or preempted."""
        self._events.append(RequestEvent(handle, kind, self._clock(), num_cached_tokens, cache_miss))

    def note_finished(self, finished: FinishedRequest) -> None:
        """A request ended."""
        self._finished.append(finished)

    def make_outputs(
        self,
        handles: np.ndarray,
        token_ids: np.ndarray,
        stats: SchedulerStats,
        logprobs: LogprobsArrays | None = None,
        prompt_logprobs: tuple[tuple[int, LogprobsArrays], ...] = (),
        drafts: DraftOutcomes | None = None,
    ) -> EngineCoreOutputs:
        """A message with these tokens and everything noted since the last one, in order."""
        finished, events = tuple(self._finished), tuple(self._events)
        self._finished, self._events = [], []
        return EngineCoreOutputs(
            handles=handles,
            new_token_ids=token_ids,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            finished=finished,
            events=events,
            stats=stats,
            timestamp=self._clock(),
            drafts=drafts,
        )
