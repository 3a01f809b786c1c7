"""ResponseEnvelope: a response around its output. Made for each response by the routes; owns nothing that changes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from quire.core.sampling_params import SamplingParams
from quire.server.api.responses.items import Item
from quire.server.api.responses.protocol import ResponsesRequest
from quire.server.api.responses.tools import echo_tool_choice, echo_tools
from quire.server.api.responses.translation import text_format
from quire.server.chat.counts import Usage
from quire.server.http.errors import ApiError

QUEUED, FAILED, CANCELLED = "queued", "failed", "cancelled"
ENDED = frozenset(("completed", "incomplete", FAILED, CANCELLED))
NOT_KEPT = {"code": "server_error", "message": "the response was completed but could not be stored"}
CUT_OFF = {"code": "server_error", "message": "the server stopped before the response was completed"}


class ResponseEnvelope:
    """What a response says besides its output.

    Args:
        request: as it came.
        params: how its tokens are chosen.
        response_id: its own.
        model: name to report.
        is_stored: it can be asked for later.
        warnings: about fields that have no effect.
    """

    def __init__(
        self,
        request: ResponsesRequest,
        params: SamplingParams,
        response_id: str,
        *,
        model: str,
        is_stored: bool,
        warnings: Sequence[str],
    ) -> None:
        self.response_id = response_id
        reasoning, text = request.reasoning, request.text
        self._head: dict[str, Any] = {
            "id": response_id, "object": "response", "created_at": int(time.time()), "model": model,
            "background": bool(request.background), "store": is_stored,
        }  # fmt: skip
        self._settings: dict[str, Any] = {
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "max_tool_calls": None,
            "metadata": request.metadata or {},
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": request.previous_response_id,
            "reasoning": {
                "effort": None if reasoning is None else reasoning.effort,
                "summary": None if reasoning is None else reasoning.summary,
            },
            "service_tier": "default",
            "temperature": params.temperature,
            "text": {"format": text_format(request), "verbosity": (text and text.verbosity) or "medium"},
            "tool_choice": echo_tool_choice(request.tool_choice),
            "tools": echo_tools(request.tools),
            "top_logprobs": request.top_logprobs or 0,
            "top_p": params.top_p,
            "truncation": request.truncation or "disabled",
            "user": None,
        }
        if warnings:
            self._settings["warnings"] = list(warnings)

    def content(
        self,
        status: str,
        output: Sequence[Item],
        *,
        usage: Usage | None = None,
        error: dict[str, str] | None = None,
        reason: str | None = None,
    ) -> dict[str, Any]:
        """The response.

        Args:
            usage: None = it is not known yet.
            error: why it failed.
            reason: why it is incomplete.
        """
        return {
            **self._head,
            "status": status,
            "completed_at": int(time.time()) if status == "completed" else None,
            "error": error,
            "incomplete_details": None if reason is None else {"reason": reason},
            "output": list(output),
            **self._settings,
            "usage": None if usage is None else usage_content(usage),
        }


def usage_content(usage: Usage) -> dict[str, Any]:
    """The `usage` object."""
    return {
        "input_tokens": usage.num_prompt,
        "input_tokens_details": {"cached_tokens": usage.total_cached, "cache_write_tokens": 0},
        "output_tokens": usage.num_completion,
        "output_tokens_details": {"reasoning_tokens": usage.num_reasoning or 0},
        "total_tokens": usage.num_prompt + usage.num_completion,
    }


def failure(error: ApiError) -> dict[str, str]:
    """`error` of a response that failed for it."""
    status = error.kind.status
    code = "server_error" if status >= 500 else "rate_limit_exceeded" if status == 429 else "invalid_prompt"
    return {"code": code, "message": error.message}


def with_status(response: dict[str, Any], status: str, error: dict[str, str] | None = None) -> dict[str, Any]:
    """A response that ended otherwise than by its answer."""
    output = [
        {**item, "status": "incomplete"} if item.get("status") == "in_progress" else item for item in response["output"]
    ]
    return {**response, "status": status, "error": error, "output": output}
