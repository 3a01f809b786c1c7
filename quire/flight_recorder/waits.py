"""Where the time of requests went, found out while a recording is run again.

Called by `Replay` around each call. Owns a timeline for each request: spans of seconds with a reason. A span lasts from
one decision of the scheduler to the next.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np

from quire.core.engine_messages import EngineCoreOutputs, EngineCoreRequest
from quire.core.stats import EventKind
from quire.scheduler.scheduler import Scheduler
from quire.scheduler.step import Step
from quire.scheduler.waiting import WaitReason

ARRIVED = "arrived during a step"
CHUNKED = "prefill (chunk)"
PREFILL = "prefill"
DECODE = "decode"
PAUSED = "skipped for a step"


@dataclass(slots=True)
class Span:
    """Seconds for one reason.

    Attributes:
        behind: the request that stood first in the queue, "" = this one.
        num_missing: most blocks that were lacking.
    """

    reason: str
    behind: str = ""
    start_s: float = 0.0
    seconds: float = 0.0
    num_steps: int = 0
    num_missing: int = 0


@dataclass(slots=True)
class Timeline:
    """One request.

    Attributes:
        arrived_s, ended_s: on the recorded clock; None = before the recording, or after it.
        preempted: (seconds on the recorded clock, why) of each time it lost its row.
    """

    handle: int
    request_id: str
    num_prompt_tokens: int
    arrived_s: float | None = None
    ended_s: float | None = None
    finish_reason: str = ""
    num_output_tokens: int = 0
    num_cached_tokens: int | None = None
    first_token_s: float | None = None
    spans: list[Span] = field(default_factory=list)
    preempted: list[tuple[float, str]] = field(default_factory=list)

    @property
    def waited_s(self) -> float:
        """Seconds without a row."""
        return sum(span.seconds for span in self.spans if span.reason not in RUNNING)


RUNNING = (CHUNKED, PREFILL, DECODE, PAUSED)


class WaitWatch:
    """Timelines of all requests, and sums over the recording."""

    def __init__(self) -> None:
        self.timelines: dict[int, Timeline] = {}
        self.num_steps = 0
        self.num_preemptions = 0
        self.num_prefix_queries = 0
        self.num_prefix_hits = 0
        self.num_scheduled_tokens = 0
        self.num_sampled_tokens = 0
        self.num_draft_tokens = self.num_accepted_tokens = 0
        self.usage_s = 0.0
        self.running_s = 0.0
        self.waiting_s = 0.0
        self.max_running = 0
        self.max_waiting = 0
        self.start_s: float | None = None
        self.now_s = 0.0
        self._current: dict[int, Span] = {}
        self._last_load = (0.0, 0, 0)

    def knows(self, message: EngineCoreRequest) -> Timeline:
        """The timeline of a request, made when it is new."""
        if message.handle not in self.timelines:
            self.timelines[message.handle] = Timeline(message.handle, message.request_id, len(message.prompt_token_ids))
        return self.timelines[message.handle]

    def _timeline(self, handle: int) -> Timeline:
        """The timeline of a handle; of one that ended before the recording began little is known."""
        if handle not in self.timelines:
            self.timelines[handle] = Timeline(handle, f"handle {handle}", 0)
        return self.timelines[handle]

    def advance(self, now_s: float) -> None:
        """The recorded clock stands at `now_s`."""
        if self.start_s is None:
            self.start_s = self.now_s = now_s
        passed, self.now_s = max(0.0, now_s - self.now_s), max(self.now_s, now_s)
        for span in self._current.values():
            span.seconds += passed
        usage, num_running, num_waiting = self._last_load
        self.usage_s += passed * usage
        self.running_s += passed * num_running
        self.waiting_s += passed * num_waiting

    def added(self, message: EngineCoreRequest) -> None:
        """A request came."""
        self.knows(message).arrived_s = self.now_s
        self._enter(message.handle, ARRIVED)

    def scheduled(self, scheduler: Scheduler, step: Step | None) -> None:
        """A step was decided; its rows run, the others wait for what the scheduler says."""
        waiting = scheduler.unplaced_requests()
        blocked = None if step is None else step.plan.blocked
        first = None if blocked is None else self.timelines.get(blocked.handle)
        for message in waiting:
            self.knows(message)
            if blocked is None or first is None:
                self._enter(message.handle, WaitReason.OTHER.value)
                continue
            behind = "" if message.handle == blocked.handle else first.request_id
            self._enter(message.handle, blocked.reason.value, behind, blocked.num_missing)
        self._run(scheduler, step)

    def _run(self, scheduler: Scheduler, step: Step | None) -> None:
        planned: dict[int, tuple[int, bool]] = {}
        if step is not None:
            scheduled = step.output
            self.num_steps += 1
            self.num_scheduled_tokens += scheduled.total_num_scheduled_tokens
            columns = (scheduled.rows, scheduled.num_scheduled_tokens, scheduled.is_sampling)
            for row, num_tokens, is_sampling in zip(*(one.tolist() for one in columns), strict=True):
                planned[row] = num_tokens, is_sampling
        for row, message in scheduler.placed_requests():
            timeline = self.knows(message)
            num_tokens, is_sampling = planned.get(row, (0, False))
            if num_tokens == 0:
                reason = PAUSED
            elif not is_sampling:
                reason = CHUNKED
            else:
                reason = PREFILL if timeline.num_output_tokens == 0 or num_tokens > 1 else DECODE
            self._enter(message.handle, reason)

    def told(self, outputs: EngineCoreOutputs | None, cause: str) -> None:
        """Outputs were sent to the front end: tokens, events and ends; `cause` is why requests were preempted."""
        if outputs is None:
            return
        handles, counts = np.unique(outputs.handles, return_counts=True)
        for handle, count in zip(handles.tolist(), counts.tolist(), strict=True):
            timeline = self._timeline(handle)
            if timeline.first_token_s is None:
                timeline.first_token_s = outputs.timestamp
            timeline.num_output_tokens += count
            self.num_sampled_tokens += count
        if outputs.drafts is not None:
            self.num_draft_tokens += int(outputs.drafts.num_drafted.sum())
            self.num_accepted_tokens += int(outputs.drafts.num_accepted.sum())
        for event in outputs.events:
            timeline = self._timeline(event.handle)
            if event.kind is EventKind.PREEMPTED:
                timeline.preempted.append((event.timestamp, cause))
                self.num_preemptions += 1
            elif event.kind is EventKind.SCHEDULED and timeline.num_cached_tokens is None:
                timeline.num_cached_tokens = event.num_cached_tokens
        for end in outputs.finished:
            timeline = self._timeline(end.handle)
            timeline.ended_s, timeline.finish_reason = outputs.timestamp, str(end.finish_reason)
            self._current.pop(end.handle, None)
        stats = outputs.stats
        self.num_prefix_queries += stats.prefix_cache_queries
        self.num_prefix_hits += stats.prefix_cache_hits
        self._last_load = stats.kv_cache_usage, stats.num_running, stats.num_waiting
        self.max_running = max(self.max_running, stats.num_running)
        self.max_waiting = max(self.max_waiting, stats.num_waiting)

    def _enter(self, handle: int, reason: str, behind: str = "", num_missing: int = 0) -> None:
        span = self._current.get(handle)
        if span is None or span.reason != reason or span.behind != behind:
            span = Span(reason, behind, self.now_s)
            self._current[handle] = span
            self.timelines[handle].spans.append(span)
        span.num_steps += 1
        span.num_missing = max(span.num_missing, num_missing)

    def seconds_by_reason(self) -> dict[str, float]:
        """Seconds of waiting over all requests, by reason, the longest first."""
        sums: dict[str, float] = defaultdict(float)
        for timeline in self.timelines.values():
            for span in timeline.spans:
                if span.reason not in RUNNING:
                    sums[span.reason] += span.seconds
        return dict(sorted(sums.items(), key=lambda item: -item[1]))
