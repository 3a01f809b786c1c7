"""RecentRequests: when the latest requests were where, for `/debug/requests`.

Told by the outermost middleware of the begin and the end of each request; costs one entry a request and nothing a step.
Owns the latest `MAX_ENDED` that ended, without their texts and tokens, and those that run.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from typing import Any

import msgspec

from quire.core.stats import EventKind, RequestEvent
from quire.server.http.request_scope import RequestScope
from quire.server.http.timing_breakdown import TimingBreakdown

MAX_ENDED = 256
MAX_EVENTS = 64


class TimelineEvent(msgspec.Struct, frozen=True):
    """A lifecycle event of one sequence of a request.

    Attributes:
        at_ms: after the request was received.
        kind: "queued", "scheduled", "preempted".
        handle: of the sequence in the engine.
        cached_tokens: of "scheduled": prompt tokens found in the prefix cache.
        miss, miss_position: of "scheduled": why the cached prefix ended, and at which token; None = all that can be
            used was found.
    """

    at_ms: float
    kind: str
    handle: int
    cached_tokens: int = 0
    miss: str | None = None
    miss_position: int | None = None


class RequestTimeline(msgspec.Struct, frozen=True):
    """One request.

    Attributes:
        id: of its answer; of a request without one, its X-Request-Id.
        status: of HTTP; 0 = it runs.
        received: Unix seconds; received_s: the same on the monotonic clock, on which the engine's times are.
        metrics: its receipt, as `metrics` of an answer: milliseconds by phase, tokens per second.
        phases: milliseconds of each phase, in order; they add up to the whole time.
        events: the first `MAX_EVENTS`.
        chunks: parts of its prompt computed while someone looked: [at_ms, ms, first token, tokens, "prefill"], and
            copies to the swap space: [at_ms, ms, 0, 0, "swapped"].
    """

    id: str
    request_id: str
    path: str
    tenant: str
    model: str
    status: int
    received: float
    received_s: float
    num_prompts: int
    prompt_tokens: int
    output_tokens: int
    phases: dict[str, float]
    metrics: dict[str, Any]
    events: list[TimelineEvent]
    chunks: list[tuple[float, float, int, int, str]] = []


class RecentRequests:
    """The latest requests that asked for answers."""

    def __init__(self) -> None:
        self._running: dict[int, tuple[RequestScope, str]] = {}
        self._ended: deque[tuple[float, _Entry]] = deque(maxlen=MAX_ENDED)

    def begin(self, known: RequestScope, path: str) -> None:
        """A request came."""
        self._running[id(known)] = known, path

    def end(self, known: RequestScope, status: int, now_s: float) -> None:
        """It has ended."""
        _, path = self._running.pop(id(known))
        if known.is_metered:
            self._ended.append((time.time(), _Entry(known, path, status, now_s)))

    def timelines(self) -> Iterator[RequestTimeline]:
        """Those that run, the latest first, then those that ended, the latest first."""
        now_s, wall = time.monotonic(), time.time()
        for known, path in reversed(self._running.values()):
            if known.is_metered:
                yield _Entry(known, path, 0, now_s).timeline(wall)
        for ended_at, entry in reversed(self._ended):
            yield entry.timeline(ended_at)


class _Entry:
    """What is kept of a request; its body is not."""

    __slots__ = ("_about", "_end_s", "_receipt", "_received_s", "_tokens")

    def __init__(self, known: RequestScope, path: str, status: int, end_s: float) -> None:
        answer = known.answer
        self._received_s, self._end_s = known.received_s, end_s
        self._receipt: TimingBreakdown | None = None
        self._tokens = (0, 0, 0)
        answer_id, model = known.request_id, ""
        if answer is not None:
            answer_id, model = answer.answer_id, answer.model
            self._receipt = answer.receipt(end_s)
            self._tokens = (answer.num_prompts, answer.num_prompt_tokens, answer.num_new_tokens)
        self._about = (answer_id, known.request_id, path, known.tenant.name, model, status)

    def timeline(self, end_wall: float) -> RequestTimeline:
        """As it is shown, `end_wall` being the Unix time of its end."""
        receipt = self._receipt
        durations = {} if receipt is None else receipt.durations_us
        events = [] if receipt is None else receipt.stats.events[:MAX_EVENTS]
        return RequestTimeline(
            *self._about, received=end_wall - (self._end_s - self._received_s), received_s=self._received_s,
            num_prompts=self._tokens[0], prompt_tokens=self._tokens[1], output_tokens=self._tokens[2],
            phases={name: us / 1e3 for name, us in durations.items()},
            metrics={} if receipt is None else receipt.content(),
            events=[_event(one, self._received_s) for one in events],
        )  # fmt: skip


def _event(event: RequestEvent, received_s: float) -> TimelineEvent:
    miss = event.cache_miss
    return TimelineEvent(
        at_ms=round(1e3 * (event.timestamp - received_s), 3),
        kind=EventKind(event.kind).name.lower(),
        handle=event.handle,
        cached_tokens=event.num_cached_tokens,
        miss=None if miss is None else str(miss.full_reason),
        miss_position=None if miss is None else miss.position,
    )
