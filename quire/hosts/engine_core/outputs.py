"""From a step of the engine to what each request of it is sent. Owned by a `WireCore`; owns what is kept of requests.

The parts of a request that vLLM sends once (events, where its prompt's tokens came from, log-probabilities of the
prompt) are gathered here until its next tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from quire.core.engine_messages import EngineCoreOutputs, FinishedRequest, FinishReason
from quire.core.logprobs import LogprobsArrays
from quire.core.stats import EventKind, RequestEvent
from quire.hosts.engine_core.messages import (
    CacheStats,
    CoreEvent,
    CoreOutput,
    CoreStats,
    DraftingStats,
    PrefillStats,
    RequestError,
    array,
    logprobs_of,
    tensor,
)

SENT_EVENTS = (EventKind.QUEUED, EventKind.SCHEDULED, EventKind.PREEMPTED)


@dataclass(slots=True)
class WireRequest:
    """A request that has not ended.

    Attributes:
        request_id: the front end's name for it.
        client: which front end.
        num_logprobs, num_prompt_logprobs: top tokens that it asked for; None = none.
        token_ids: put out so far; a core that replaces another is given them.
        is_discarded: its front end has ended it and wants no more of it.
    """

    request_id: str
    client: int
    num_prompt_tokens: int
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None
    token_ids: list[int] = field(default_factory=list)
    events: list[CoreEvent] = field(default_factory=list)
    prefill: PrefillStats | None = None
    prompt_logprobs: list[LogprobsArrays] = field(default_factory=list)
    is_discarded: bool = False

    def note_event(self, event: RequestEvent) -> None:
        """Take in a lifecycle event."""
        if event.kind in SENT_EVENTS:
            self.events.append(CoreEvent(int(event.kind), event.timestamp))
        if event.kind is EventKind.SCHEDULED and self.prefill is None and not self.token_ids:
            total, cached = self.num_prompt_tokens, event.num_cached_tokens
            self.prefill = PrefillStats(total, total - cached, cached, cached)

    def restart(self) -> None:
        """A core lost it before its first token: what came of its prompt comes again."""
        if not self.token_ids:
            self.prompt_logprobs = []

    def take(self, token_ids: list[int], lines: LogprobsArrays | None, end: FinishedRequest | None) -> CoreOutput:
        """What is sent of a step; `lines` are those of `token_ids`."""
        is_first = not self.token_ids
        self.token_ids += token_ids
        output = CoreOutput(self.request_id, token_ids)
        if lines is not None and self.num_logprobs is not None and len(lines.index):
            output.new_logprobs = logprobs_of(lines, self.num_logprobs, array)
        if self.prompt_logprobs:
            output.new_prompt_logprobs = self._take_prompt_logprobs()
        if self.events:
            output.events, self.events = self.events, []
        if is_first:
            output.prefill_stats = self.prefill
        if end is not None:
            output.finish_reason, output.stop_reason = finish_code(end.finish_reason), end.stop_reason
            output.kv_transfer_params = end.kv_transfer_params
            output.error = error_of(end)
        return output

    def _take_prompt_logprobs(self) -> tuple[object, ...]:
        parts, self.prompt_logprobs = self.prompt_logprobs, []
        width = max(part.token_ids.shape[1] for part in parts)
        joined = LogprobsArrays(
            np.concatenate([part.index for part in parts]),
            np.concatenate([_widened(part.token_ids, width, -1) for part in parts]),
            np.concatenate([_widened(part.logprobs, width, np.nan) for part in parts]),
            np.concatenate([_widened(part.ranks, width, 0) for part in parts]),
        )
        return *logprobs_of(joined, self.num_prompt_logprobs or 0, tensor), None


def finish_code(reason: FinishReason) -> int:
    """The number of an end in vLLM; what it does not have is an error."""
    return int(FinishReason.ERROR if reason is FinishReason.QUEUE_TIMEOUT else reason)


def error_of(end: FinishedRequest) -> RequestError | None:
    """Why a request failed; None when it did not."""
    if finish_code(end.finish_reason) != FinishReason.ERROR:
        return None
    if end.finish_reason is FinishReason.QUEUE_TIMEOUT:
        return RequestError(end.error or "it waited too long", "queue_timeout", retryable=True)
    code = "internal_error" if end.error_field is None else "validation_error"
    return RequestError(end.error or "the engine failed", code)


def tokens_of(step: EngineCoreOutputs) -> dict[int, list[int]]:
    """Handle -> its new tokens, in order."""
    tokens: dict[int, list[int]] = {}
    for handle, token_id in zip(step.handles.tolist(), step.new_token_ids.tolist(), strict=True):
        tokens.setdefault(handle, []).append(token_id)
    return tokens


def lines_of(step: EngineCoreOutputs, handle: int) -> LogprobsArrays | None:
    """The log-probabilities of one request's new tokens; None when the step has none."""
    if step.logprobs is None:
        return None
    return step.logprobs.select(step.handles == handle)


def stats_of(step: EngineCoreOutputs, num_drafts_at_most: int) -> CoreStats:
    """The scheduler after a step."""
    stats = step.stats
    return CoreStats(
        num_running_reqs=stats.num_running,
        num_waiting_reqs=stats.num_waiting,
        step_counter=stats.step,
        kv_cache_usage=stats.kv_cache_usage,
        prefix_cache_stats=CacheStats(
            requests=_num_looked_up(step.events), queries=stats.prefix_cache_queries, hits=stats.prefix_cache_hits
        ),
        spec_decoding_stats=_drafting(step, num_drafts_at_most),
        kv_connector_stats=None,
    )


def _num_looked_up(events: Iterable[RequestEvent]) -> int:
    return sum(event.kind is EventKind.SCHEDULED for event in events)


def _drafting(step: EngineCoreOutputs, num_at_most: int) -> DraftingStats | None:
    if step.drafts is None:
        return None
    stats = DraftingStats(num_at_most, num_accepted_tokens_per_pos=[0] * num_at_most)
    for _, num_drafted, num_accepted in step.drafts.items():
        stats.num_drafts += 1
        stats.num_draft_tokens += num_drafted
        stats.num_accepted_tokens += num_accepted
        for position in range(min(num_accepted, num_at_most)):
            stats.num_accepted_tokens_per_pos[position] += 1
    return stats


def _widened(values: np.ndarray, width: int, padding: float) -> np.ndarray:
    missing = width - values.shape[1]
    return values if not missing else np.pad(values, ((0, 0), (0, missing)), constant_values=padding)
