"""What has happened and was not yet told to the front-end: turning points and ends.

Written by the scheduler, emptied into the next `EngineCoreOutputs`, so each is reported once.
"""

from __future__ import annotations

from collections.abc import Callable

from quire.core.cache_info import CacheMiss
from quire.core.engine_messages import FinishedRequest
from quire.core.stats import EventKind, RequestEvent


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

    def take(self) -> tuple[tuple[FinishedRequest, ...], tuple[RequestEvent, ...]]:
        """Everything noted since the last call, in order."""
        taken = tuple(self._finished), tuple(self._events)
        self._finished, self._events = [], []
        return taken
