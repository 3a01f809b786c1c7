"""What both APIs say around their answers: head, usage, where the time went.

Used by `chat` and `completion`. Owns the counts of one response.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from quire.core.outputs import RequestOutput
from quire.core.stats import RequestStateStats
from quire.entrypoints.openai.protocol.generation import GenerationFields
from quire.entrypoints.openai.running import Work
from quire.entrypoints.openai.state import ServerState

encode = msgspec.json.Encoder().encode


@dataclass(slots=True)
class Usage:
    """Tokens of one response."""

    num_prompt: int
    num_completion: int = 0
    num_cached: dict[int, int] = field(default_factory=dict)

    def content(self) -> dict[str, Any]:
        """The `usage` object."""
        return {
            "prompt_tokens": self.num_prompt,
            "total_tokens": self.num_prompt + self.num_completion,
            "completion_tokens": self.num_completion,
            "prompt_tokens_details": {"cached_tokens": sum(self.num_cached.values())},
        }


class AnswerForm:
    """The parts of a response that do not depend on the API.

    Args:
        state: of the server.
        request: as it came.
        work: what was asked of the engine.
        model: name to report.
        warnings: about fields that were not used.
        kind: of the object.
    """

    def __init__(
        self,
        state: ServerState,
        request: GenerationFields,
        work: Work,
        *,
        model: str,
        warnings: Sequence[str],
        kind: str,
    ) -> None:
        options = request.stream_options
        self.work = work
        self.request = request
        self.warnings = list(warnings)
        self.usage = Usage(sum(len(prompt.prompt_token_ids) for prompt in work.prompts))
        self.head = {
            "id": work.public_id, "object": kind, "created": int(time.time()), "model": model,
            "system_fingerprint": state.fingerprint,
        }  # fmt: skip
        self.tokenizer = state.engine.tokenizer
        as_ids = request.return_tokens_as_token_ids
        self.shows_ids = state.config.api.return_tokens_as_token_ids if as_ids is None else as_ids
        self.shows_metrics = state.config.api.enable_per_request_metrics
        self.shows_usage_at_end = bool(options and options.include_usage) or state.config.api.enable_force_include_usage
        self.shows_usage_always = bool(options and options.include_usage and options.continuous_usage_stats)
        self._last_stats: RequestStateStats | None = None

    def note(self, prompt_index: int, output: RequestOutput) -> None:
        """Count an output."""
        usage = self.usage
        for answer in output.outputs:
            usage.num_completion += len(answer.token_ids)
        if output.num_cached_tokens is not None:
            usage.num_cached[prompt_index] = output.num_cached_tokens
        self._last_stats = output.metrics

    def event(self, choices: list[dict[str, Any]], extra: dict[str, Any] | None = None) -> bytes:
        """One event of a stream."""
        content: dict[str, Any] = {**self.head, "choices": choices, **(extra or {})}
        if self.shows_usage_always and "usage" not in content:
            content["usage"] = self.usage.content()
        return b"data: " + encode(content) + b"\n\n"

    def event_head(self) -> bytes:
        """The constant beginning of an event, up to its choices."""
        return b"data: " + encode(self.head)[:-1] + b',"choices":['

    def first_extra(self) -> dict[str, Any]:
        """What only the first event of a stream says besides its choices."""
        return {"warnings": self.warnings} if self.warnings else {}

    def last_event(self) -> bytes:
        """The event that ends a stream with usage; nothing when it was not asked for."""
        extra: dict[str, Any] = {}
        if self.shows_usage_at_end:
            extra["usage"] = self.usage.content()
        if self.shows_metrics:
            extra["metrics"] = self.metrics()
        return self.event([], extra) if extra else b""

    def whole(self, choices: list[dict[str, Any]], extra: dict[str, Any]) -> bytes:
        """A response that is not a stream."""
        content: dict[str, Any] = {**self.head, "choices": choices, "usage": self.usage.content(), **extra}
        if self.shows_metrics:
            content["metrics"] = self.metrics()
        return encode({**content, **self.first_extra()})

    def metrics(self) -> dict[str, Any]:
        """Where the request's wall time went; the phases add up to `total_ms`."""
        now, stats = time.monotonic(), self._last_stats or RequestStateStats()
        times = [self.work.received_s, stats.queued_ts, stats.scheduled_ts, stats.first_token_ts, stats.last_token_ts]
        for index in range(1, len(times)):
            times[index] = max(times[index], times[index - 1])
        milliseconds = [round(1e3 * (end - start), 3) for start, end in zip(times, [*times[1:], now], strict=True)]
        names = ("prepare_ms", "queued_ms", "prefill_ms", "decode_ms", "deliver_ms")
        decode_s, num_tokens = times[4] - times[3], self.usage.num_completion
        return {
            **dict(zip(names, milliseconds, strict=True)),
            "total_ms": round(1e3 * (now - times[0]), 3),
            "time_to_first_token_ms": round(1e3 * (times[3] - times[0]), 3),
            "queue_time_ms": milliseconds[1],
            "generation_time_ms": milliseconds[3],
            "mean_itl_ms": round(1e3 * decode_s / (num_tokens - 1), 3) if num_tokens > 1 else None,
            "tokens_per_second": round((num_tokens - 1) / decode_s, 3) if num_tokens > 1 and decode_s > 0 else None,
        }
