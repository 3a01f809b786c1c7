"""What the front-end keeps of a request: its answers as they grow, and what of them was handed out.

Owned by the `OutputProcessor`. A `RequestGroup` is what the user submitted; each of its `n` answers is one
`RequestState`, which the engine core knows by a handle of its own.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from quire.core.cache_info import MissReason, PrefixCacheInfo
from quire.core.draft_stats import DraftStats
from quire.core.engine_messages import FinishedRequest, FinishReason
from quire.core.logprobs import LogprobsArrays
from quire.core.outputs import CompletionOutput, PromptProgress, RequestOutput
from quire.core.sampling_params import RequestOutputKind, SamplingParams
from quire.core.stats import EventKind, RequestEvent, RequestStateStats, merged_stats
from quire.engine.detokenizer import Detokenizer
from quire.engine.logprobs import LogprobLine, LogprobsCollector
from quire.errors import ValidationError
from quire.tokenization.tokenizer import Tokenizer


class RequestState:
    """One answer.

    Args:
        handle: the engine core's name for it.
        index: which of the request's `n` answers.
        params: as the engine core got them.
        prompt_token_ids: what the answer follows.
        tokenizer: None when the engine works with ids alone.
        arrival_ts: seconds on the monotonic clock.
    """

    __slots__ = (
        "_arrival_ts", "_decodes_at_end", "_error", "_is_beam", "_keeps_stop_text", "_last_prefill", "_num_decoded",
        "_num_taken", "_tells_progress", "detokenizer", "finish_reason", "handle", "index", "kv_transfer_params",
        "logprobs", "prefix_cache", "stats", "stop_reason", "token_ids",
    )  # fmt: skip

    def __init__(
        self,
        handle: int,
        index: int,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        tokenizer: Tokenizer | None,
        arrival_ts: float = 0.0,
    ) -> None:
        self.handle = handle
        self.index = index
        self.token_ids: list[int] = []
        self.finish_reason: str | None = None
        self.kv_transfer_params: dict[str, Any] | None = None
        self.stop_reason: int | str | None = None
        self.prefix_cache: PrefixCacheInfo | None = None
        self.stats = RequestStateStats()
        self.detokenizer = Detokenizer(tokenizer, params, prompt_token_ids)
        self._is_beam = params.beam_search is not None
        self.logprobs = LogprobsCollector(
            tokenizer,
            wants_output=params.logprobs is not None and not self._is_beam,
            wants_prompt=params.prompt_logprobs is not None,
        )
        self._arrival_ts = arrival_ts
        self._decodes_at_end = params.output_kind is RequestOutputKind.FINAL_ONLY
        self._keeps_stop_text = params.include_stop_str_in_output
        self._num_decoded = 0
        self._num_taken = 0
        self._error: str | None = None
        self._tells_progress = params.return_progress
        self._last_prefill: RequestEvent | None = None

    @property
    def is_finished(self) -> bool:
        """True once the answer has ended."""
        return self.finish_reason is not None

    def add_tokens(
        self,
        new_token_ids: list[int],
        logprobs: LogprobsArrays | None,
        lines: Sequence[int | None],
        finished: FinishedRequest | None,
        timestamp: float,
    ) -> bool:
        """Take in one step's tokens, and its end if the engine core ended it.

        Args:
            lines: of the tokens in `logprobs`, None = it has none; empty when there are no logprobs.

        Returns:
            True when a stop string ended the answer, so that the engine core has to abort it.
        """
        if self._is_beam:
            if new_token_ids:
                self._note_times(timestamp)
            new_token_ids, lines = self._take_beam(finished), ()
        first = len(self.token_ids)
        self.token_ids += new_token_ids
        if new_token_ids:
            self._note_times(timestamp)
        if not self._decodes_at_end or finished is not None or self.detokenizer.has_stop_strings:
            self._decode(finished)
        if logprobs is not None:
            for line in lines[: len(self.token_ids) - first]:
                if line is not None:
                    self.logprobs.add_output(logprobs, line)
        self.stats.num_generation_tokens = len(self.token_ids)
        if self.stats.drafts is not None and len(new_token_ids) > 1:
            self.stats.drafts.num_steps_saved += len(new_token_ids) - 1
        is_stopped_here = self.finish_reason is not None
        if finished is not None:
            self.kv_transfer_params = finished.kv_transfer_params
        if finished is not None and not is_stopped_here:
            self.end(finished.finish_reason, finished.stop_reason)
            self._error = finished.error
        return is_stopped_here and finished is None

    def _take_beam(self, finished: FinishedRequest | None) -> list[int]:
        """A beam search returns its answers at the end."""
        if finished is None or finished.beam is None:
            return []
        self.logprobs.cumulative = finished.beam.cum_logprob
        tokens: list[int] = finished.beam.token_ids.tolist()
        return tokens

    def note_event(self, event: RequestEvent) -> None:
        """Take in a lifecycle event."""
        stats = self.stats
        if event.kind is EventKind.PREFILLED:
            self._last_prefill = event
            return
        stats.events.append(event)
        if event.kind is EventKind.QUEUED:
            stats.queued_ts = stats.queued_ts or event.timestamp
        elif event.kind is EventKind.PREEMPTED:
            stats.num_preemptions += 1
        elif not stats.scheduled_ts:
            stats.scheduled_ts = event.timestamp
            self.prefix_cache = PrefixCacheInfo(event.num_cached_tokens, event.cache_miss)
        elif event.cache_miss is not None and event.cache_miss.reason is MissReason.PREEMPTED and self.prefix_cache:
            self.prefix_cache = PrefixCacheInfo(self.prefix_cache.cached_tokens, event.cache_miss)

    def note_drafts(self, num_drafted: int, num_accepted: int, *, keeps_steps: bool) -> None:
        """A step verified drafts of it; its tokens come afterwards."""
        if self.stats.drafts is None:
            self.stats.drafts = DraftStats(steps=[] if keeps_steps else None)
        self.stats.drafts.add(num_drafted, num_accepted)

    def restart(self) -> None:
        """The engine core lost the request and will be sent it again: what came before its first token comes again."""
        self.stats.num_restarts += 1
        if not self.token_ids:
            self.logprobs.clear_prompt()

    def resume(self, token_ids: list[int]) -> None:
        """The answer begins with these tokens, which another engine put out: their text is not new.

        Raises:
            ValidationError: they end it.
        """
        self.token_ids = list(token_ids)
        self._decode(None)
        if self.finish_reason is not None:
            raise ValidationError(
                "snapshot cannot be continued: a stop string has ended it", hint="send what a replica gave",
                field="snapshot",
            )  # fmt: skip
        self._num_taken = len(self.token_ids)
        if self.token_ids:
            self.detokenizer.take(delta=True)
        self.stats.num_generation_tokens = len(self.token_ids)

    def end(self, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """The answer has ended; what is left of its text becomes visible."""
        late_stop = self.detokenizer.finish()
        self.finish_reason = str(FinishReason.STOP if late_stop else reason)
        self.stop_reason = late_stop or stop_reason

    def take_completion(self, *, delta: bool) -> CompletionOutput:
        """The answer so far, or what is new in it."""
        start = self._num_taken if delta else 0
        self._num_taken = len(self.token_ids)
        logprobs = self.logprobs.output
        return CompletionOutput(
            index=self.index,
            text=self.detokenizer.take(delta=delta),
            token_ids=self.token_ids[start:],
            cumulative_logprob=self.logprobs.cumulative,
            logprobs=None if logprobs is None else logprobs[start:],
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            error=self._error,
            spec_decode_metrics=self.stats.drafts,
        )

    def take_progress(self, num_prompt_tokens: int) -> PromptProgress | None:
        """News of the prompt since the last call; the last news come with the first token."""
        if not self._tells_progress:
            return None
        part, self._last_prefill = self._last_prefill, None
        stats = self.stats
        if self.token_ids:
            self._tells_progress = False
            processed, timestamp = num_prompt_tokens, stats.first_token_ts
        elif part is not None:
            processed, timestamp = part.num_cached_tokens, part.timestamp
        else:
            return None
        cached = 0 if self.prefix_cache is None else self.prefix_cache.cached_tokens
        return PromptProgress(num_prompt_tokens, cached, processed, max(0.0, timestamp - stats.scheduled_ts))

    def _decode(self, finished: FinishedRequest | None) -> None:
        """Make text of the tokens that have none yet; a stop text cuts the tokens after it."""
        first = self._num_decoded
        ends_with_stop_token = finished is not None and finished.finish_reason is FinishReason.STOP
        stopped = self.detokenizer.push(
            self.token_ids[first:], is_last_hidden=ends_with_stop_token and not self._keeps_stop_text
        )
        if stopped is not None:
            del self.token_ids[first + stopped.num_tokens :]
            self.finish_reason, self.stop_reason = str(FinishReason.STOP), stopped.stop
        self._num_decoded = len(self.token_ids)

    def _note_times(self, timestamp: float) -> None:
        if not self.stats.first_token_ts:
            self.stats.first_token_ts = timestamp
            self.stats.first_token_latency = timestamp - self._arrival_ts
        self.stats.last_token_ts = timestamp


@dataclass(slots=True)
class RequestGroup:
    """A request as the user sees it.

    Attributes:
        request_id: the user's name for it.
        prompt: its text, if it came as text.
        output_kind: what each output holds.
        states: its answers, by index.
        arrival_time: seconds, wall clock.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    output_kind: RequestOutputKind
    states: list[RequestState]
    arrival_time: float = 0.0
    _prompt_logprobs_taken: bool = field(default=False)

    @property
    def is_finished(self) -> bool:
        """True once every answer has ended."""
        if len(self.states) == 1:  # nearly always
            return self.states[0].finish_reason is not None
        return all(state.is_finished for state in self.states)

    def take_output(self, changed: Iterable[RequestState], *, finished: bool) -> RequestOutput | None:
        """The output that is due now, or None.

        Args:
            changed: answers that got tokens or ended since the last call.
            finished: `is_finished`, which the caller knows.
        """
        is_delta = self.output_kind is RequestOutputKind.DELTA
        if self.output_kind is RequestOutputKind.FINAL_ONLY and not finished:
            return None
        prefix_cache = self.states[0].prefix_cache
        states = sorted(changed, key=_index_of) if is_delta else self.states
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=[state.take_completion(delta=is_delta) for state in states],
            finished=finished,
            prompt_logprobs=self._take_prompt_logprobs(once=is_delta),
            num_cached_tokens=None if prefix_cache is None else prefix_cache.cached_tokens,
            metrics=self._metrics(is_finished=finished),
            prefix_cache=prefix_cache,
            prompt_progress=self.states[0].take_progress(len(self.prompt_token_ids)),
            kv_transfer_params=self.states[0].kv_transfer_params,
        )

    def _take_prompt_logprobs(self, *, once: bool) -> list[LogprobLine | None] | None:
        lines = self.states[0].logprobs.prompt
        if lines is None or (once and self._prompt_logprobs_taken):
            return None
        self._prompt_logprobs_taken = True
        return list(lines)

    def _metrics(self, *, is_finished: bool) -> RequestStateStats:
        """Timings of the whole request: from its first answer's beginning to its last one's end."""
        states = self.states
        stats = states[0].stats if len(states) == 1 else merged_stats([state.stats for state in states])
        stats.arrival_time = self.arrival_time
        if is_finished:
            stats.output_ts = time.monotonic()
        return stats


def _index_of(state: RequestState) -> int:
    return state.index
