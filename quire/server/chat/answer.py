"""What completions and chats say around their answers. Used by `chat` and `completion`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec

from quire.core.outputs import PromptProgress
from quire.server.chat.counts import AnswerCounts, Usage
from quire.server.chat.protocol.generation import GenerationFields
from quire.server.chat.running import GenerationJob
from quire.server.chat.state import ServerState

encode = msgspec.json.Encoder().encode


class AnswerEnvelope(AnswerCounts):
    """The parts of a response that completions and chats share: head, usage, where the time went.

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
        work: GenerationJob,
        *,
        model: str,
        warnings: Sequence[str],
        kind: str,
    ) -> None:
        super().__init__(state, work, model, reports_cache=bool(request.return_cache_info))
        options = request.stream_options
        self.request = request
        self.warnings = list(warnings)
        self.head = {
            "id": work.public_id, "object": kind, "created": int(time.time()), "model": model,
            "system_fingerprint": state.fingerprint,
        }  # fmt: skip
        self.tokenizer = state.engine.tokenizer
        as_ids = request.return_tokens_as_token_ids
        self.shows_ids = state.config.api.return_tokens_as_token_ids if as_ids is None else as_ids
        forced = state.config.api.enable_force_include_usage
        self.shows_usage_at_end = forced or bool(options and options.include_usage)
        always = options.continuous_usage_stats if options is not None else None
        self.shows_usage_always = self.shows_usage_at_end and (forced if always is None else always)

    def event(self, choices: list[dict[str, Any]], extra: dict[str, Any] | None = None) -> bytes:
        """One event of a stream."""
        content: dict[str, Any] = {**self.head, "choices": choices, **(extra or {})}
        if self.shows_usage_always and "usage" not in content:
            content["usage"] = usage_content(self.usage)
        return b"data: " + encode(content) + b"\n\n"

    def progress_event(self, choice: dict[str, Any], progress: PromptProgress) -> bytes:
        """An event that says how far a prompt is computed, in llama.cpp's words, with an empty `choice`."""
        content = {
            "total": progress.total, "cache": progress.cached, "processed": progress.processed,
            "time_ms": round(1e3 * progress.seconds),
        }  # fmt: skip
        return self.event([{**choice, "logprobs": None, "finish_reason": None}], {"prompt_progress": content})

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
            extra["usage"] = usage_content(self.usage)
        extra.update(self.metrics())
        extra.update(self.prefix_cache())
        return self.event([], extra) if extra else b""

    def whole(self, choices: list[dict[str, Any]], extra: dict[str, Any]) -> bytes:
        """A response that is not a stream."""
        content: dict[str, Any] = {**self.head, "choices": choices, "usage": usage_content(self.usage), **extra}
        content.update(self.metrics())
        content.update(self.prefix_cache())
        return encode({**content, **self.first_extra()})


def usage_content(usage: Usage) -> dict[str, Any]:
    """The `usage` object."""
    content: dict[str, Any] = {
        "prompt_tokens": usage.num_prompt,
        "total_tokens": usage.num_prompt + usage.num_completion,
        "completion_tokens": usage.num_completion,
        "prompt_tokens_details": {"cached_tokens": usage.total_cached},
    }
    if usage.num_reasoning is not None:
        content["completion_tokens_details"] = {"reasoning_tokens": usage.num_reasoning}
    return content
