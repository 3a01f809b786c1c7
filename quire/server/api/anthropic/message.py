"""What a Messages answer says around its blocks: why it ended, what it used. Pure functions."""

from __future__ import annotations

from typing import Any

from quire.core.outputs import CompletionOutput
from quire.server.chat.counts import Usage
from quire.server.http.errors import UNAVAILABLE, ApiError

CUT = "the server is shutting down; the response was truncated"


def stop_reason(answer: CompletionOutput, *, has_calls: bool, is_at_limit: bool) -> tuple[str, str | None]:
    """(`stop_reason`, `stop_sequence`) of an answer that has ended.

    Args:
        has_calls: the message has tool_use blocks, which want to be answered.
        is_at_limit: it has as many tokens as were asked for; where it was cut before, the model had no more room.

    Raises:
        ApiError: it was cut from outside, which this API has no reason for.
    """
    if answer.finish_reason == "abort":
        raise ApiError(UNAVAILABLE, CUT, retry_after_s=1, reason="")
    if answer.finish_reason == "length":
        return "max_tokens" if is_at_limit else "model_context_window_exceeded", None
    if has_calls:
        return "tool_use", None
    if answer.finish_reason == "stop" and isinstance(answer.stop_reason, str):
        return "stop_sequence", answer.stop_reason
    return "end_turn", None


def usage_content(usage: Usage) -> dict[str, Any]:
    """The `usage` object: the prompt's tokens are those that were computed and those that were read from the cache."""
    content: dict[str, Any] = {
        "input_tokens": usage.num_prompt - usage.total_cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.total_cached,
        "output_tokens": usage.num_completion,
    }
    if usage.num_reasoning is not None:
        content["output_tokens_details"] = {"thinking_tokens": usage.num_reasoning}
    return content
