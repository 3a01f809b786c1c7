"""POST /v1/chat/completions: its fields. No state."""

from __future__ import annotations

from typing import Any

from quire.config.server import LimitsConfig
from quire.core.sampling_params import SamplingParams
from quire.errors import ValidationError
from quire.server.chat.protocol.generation import (
    NO_EFFECT,
    NOT_YET,
    GenerationFields,
    check_common,
    sampling_params,
)
from quire.server.chat.protocol.messages import read_messages
from quire.server.chat.protocol.reading import RequestFields
from quire.server.chat.protocol.warnings import Warnings
from quire.utils.checks import check_int

CHAT_NOT_YET: dict[str, tuple[Any, ...]] = {
    **NOT_YET,
    "functions": ([],),
    "function_call": ("none",),
    "audio": (),
    "modalities": (["text"],),
    "web_search_options": (),
    "reasoning": (),
    "thinking": (),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
}


class ChatFields(GenerationFields, kw_only=True):
    """What makes the prompt of a chat."""

    messages: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    reasoning_effort: str | None = None


class ChatRequest(ChatFields, kw_only=True):
    """A chat."""

    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    thinking_token_budget: int | None = None


CHAT_FIELDS = RequestFields(ChatRequest, CHAT_NOT_YET, NO_EFFECT | {"verbosity", "prediction"})


def chat_messages(request: ChatFields, warnings: Warnings) -> list[dict[str, Any]]:
    """The messages, with the keys that are used.

    Args:
        warnings: as of `read_messages`.

    Raises:
        ValidationError, UnsupportedError: there are none, or as `read_messages`.
    """
    if not request.messages:
        raise ValidationError(
            "messages is missing or empty", hint='give [{"role": "user", "content": ...}]', field="messages"
        )
    return read_messages(request.messages, warnings)


def chat_params(request: ChatRequest, defaults: dict[str, Any], limits: LimitsConfig) -> SamplingParams:
    """How tokens are chosen; without a limit of tokens the answer may fill the model's length."""
    check_common(request, limits)
    max_tokens = request.max_completion_tokens
    if max_tokens is None:
        max_tokens = request.max_tokens
    else:
        check_int("max_completion_tokens", max_tokens, 1)
    logprobs = _logprobs(request)
    return sampling_params(
        request,
        defaults,
        max_tokens=defaults.get("max_tokens") if max_tokens is None else max_tokens,
        logprobs=logprobs,
        prompt_logprobs=request.prompt_logprobs,
    )


def _logprobs(request: ChatRequest) -> int | None:
    if request.top_logprobs is not None:
        check_int("top_logprobs", request.top_logprobs, -1)
        if not request.logprobs and request.top_logprobs != 0:
            raise ValidationError("top_logprobs needs logprobs=true", hint="set logprobs", field="top_logprobs")
    if request.logprob_token_ids is not None:
        if not request.logprobs:
            raise ValidationError(
                "logprob_token_ids needs logprobs=true", hint="set logprobs", field="logprob_token_ids"
            )
        return request.top_logprobs or None
    if not request.logprobs:
        return None
    return request.top_logprobs or 0
