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
from quire.core.stats import RequestStateStats, merged_stats
from quire.entrypoints.openai.protocol.generation import GenerationFields
from quire.entrypoints.openai.receipt import Receipt, make_receipt
from quire.entrypoints.openai.running import Work
from quire.entrypoints.openai.state import ServerState

encode = msgspec.json.Encoder().encode


@dataclass(slots=True)
class Usage:
    """Tokens of one response.

    Attributes:
        num_reasoning: of those of the answers, how many are thinking; None = not told.
    """

    num_prompt: int
    num_completion: int = 0
    num_reasoning: int | None = None
    num_cached: dict[int, int] = field(default_factory=dict)

    def content(self) -> dict[str, Any]:
        """The `usage` object."""
        content: dict[str, Any] = {
            "prompt_tokens": self.num_prompt,
            "total_tokens": self.num_prompt + self.num_completion,
            "completion_tokens": self.num_completion,
            "prompt_tokens_details": {"cached_tokens": sum(self.num_cached.values())},
        }
        if self.num_reasoning is not None:
            content["completion_tokens_details"] = {"reasoning_tokens": self.num_reasoning}
        return content


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
        self._cache_reports: dict[int, dict[str, Any]] | None = None
        if request.return_cache_info or state.config.api.enable_per_request_metrics:
            self._cache_reports = {}
        self._cache_view = state.cache_view
        self.shows_metrics = state.config.api.enable_per_request_metrics
        self.shows_usage_at_end = bool(options and options.include_usage) or state.config.api.enable_force_include_usage
        self.shows_usage_always = bool(options and options.include_usage and options.continuous_usage_stats)
        self._stats: dict[int, RequestStateStats] = {}
        self._made_s = time.monotonic()

    def note(self, prompt_index: int, output: RequestOutput) -> None:
        """Count an output."""
        usage = self.usage
        for answer in output.outputs:
            usage.num_completion += len(answer.token_ids)
        if output.num_cached_tokens is not None:
            usage.num_cached[prompt_index] = output.num_cached_tokens
        self._stats[prompt_index] = output.metrics
        if self._cache_reports is not None and output.prefix_cache is not None:
            self._cache_reports[prompt_index] = self._cache_view.report(output.prefix_cache)

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
            extra["metrics"] = self.receipt().content()
        extra.update(self._prefix_cache())
        return self.event([], extra) if extra else b""

    def whole(self, choices: list[dict[str, Any]], extra: dict[str, Any]) -> bytes:
        """A response that is not a stream."""
        content: dict[str, Any] = {**self.head, "choices": choices, "usage": self.usage.content(), **extra}
        if self.shows_metrics:
            content["metrics"] = self.receipt().content()
        content.update(self._prefix_cache())
        return encode({**content, **self.first_extra()})

    def _prefix_cache(self) -> dict[str, Any]:
        """What the prefix cache did: an object, or a list where there were several prompts; {} unless asked for."""
        if self._cache_reports is None:
            return {}
        reports = [self._cache_reports.get(index) for index in range(len(self.work.prompts))]
        return {"prefix_cache": reports[0] if len(reports) == 1 else reports}

    def receipt(self, now_s: float | None = None) -> Receipt:
        """Where the request's time went until `now_s`, by default now."""
        stats = merged_stats(list(self._stats.values()) or [RequestStateStats(queued_ts=self._made_s)])
        return make_receipt(
            self.work.received_s, stats, time.monotonic() if now_s is None else now_s,
            sum(self.usage.num_cached.values()), self.usage.num_completion,
        )  # fmt: skip
