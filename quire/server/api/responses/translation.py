"""A request for a response as a request for a chat, the representation that all APIs share. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from quire.errors import ValidationError
from quire.server.api.responses.items import Item, messages_of
from quire.server.api.responses.protocol import ResponsesRequest, wants_logprobs
from quire.server.api.responses.tools import chat_choice, chat_tools
from quire.server.chat.protocol.chat import ChatRequest
from quire.server.chat.protocol.effort import effort_kwargs
from quire.server.chat.protocol.fields import shared
from quire.server.chat.protocol.warnings import Warnings
from quire.utils.checks import shown, wrong_type

FORM_FIELD = "text.format"
FIELD_NAMES = {
    "messages": "input", "len(messages)": "input", "prompt": "input", "prompt_token_ids": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens", FORM_FIELD: "text", "logprobs": "include",
}  # fmt: skip
"""What a chat calls a field -> what a response does."""
FORMAT_KEYS = ("name", "schema", "strict", "description")
FORMAT_CHARS = {"name": 128, "description": 1 << 16}


class ResponseChat(ChatRequest, kw_only=True):
    """The chat of a response."""

    form_field: ClassVar[str] = FORM_FIELD


def chat_request(
    request: ResponsesRequest, items: Sequence[Item], template: str | None, warnings: Warnings
) -> ChatRequest:
    """`request` as a chat of its whole conversation.

    Args:
        items: of the earlier turns and this one.
        template: source of the chat template that will be used.
        warnings: gets each field that has no effect.

    Raises:
        ValidationError, UnsupportedError: a tool, the choice of one or the form of the text is malformed.
    """
    source = template or ""
    developer_role = "developer" if "developer" in source else "system"
    messages = messages_of(items, developer_role)
    if request.instructions:
        messages.insert(0, {"role": developer_role, "content": request.instructions})
    tools = chat_tools(request.tools, warnings)
    effort = None if request.reasoning is None else request.reasoning.effort
    kwargs = effort_kwargs("reasoning.effort", effort, request.chat_template_kwargs, source, warnings)
    translated = {
        "messages": messages,
        "tools": tools or None,
        "tool_choice": chat_choice(request.tool_choice, has_tools=bool(tools)),
        "max_completion_tokens": request.max_output_tokens,
        "truncate_prompt_tokens": _max_prompt_tokens(request),
        "logprobs": True if wants_logprobs(request) else None,
        "top_logprobs": request.top_logprobs if wants_logprobs(request) else None,
        "response_format": _response_format(request),
        "chat_template_kwargs": kwargs,
        "stream_options": None,  # those of a response say nothing of its text
    }
    return ResponseChat(**{**shared(request, ChatRequest), **translated})


def _max_prompt_tokens(request: ResponsesRequest) -> int | None:
    """How much of the prompt is used; with `truncation` auto as much as leaves room for the answer."""
    if request.truncate_prompt_tokens is not None:
        return request.truncate_prompt_tokens
    return -1 if request.truncation == "auto" else None


def text_format(request: ResponsesRequest) -> dict[str, Any]:
    """The requested text format, as responses return it."""
    given = None if request.text is None else request.text.format
    return {"type": "text"} if given is None else given


def _response_format(request: ResponsesRequest) -> dict[str, Any] | None:
    """`text.format` as `response_format`, which has the schema one level deeper."""
    given = text_format(request)
    kind = given.get("type")
    if kind not in ("text", "json_object", "json_schema"):
        raise ValidationError(
            f"text.format.type={shown(kind)} is unknown", hint="use text, json_object or json_schema", field="text"
        )
    unknown = [name for name in given if name not in ("type", *(FORMAT_KEYS if kind == "json_schema" else ()))]
    if unknown:
        raise ValidationError(
            f"text.format.{shown(unknown[0])} is unknown", hint=f"use {', '.join(FORMAT_KEYS)}", field="text"
        )
    if kind != "json_schema":
        return {"type": kind} if kind == "json_object" else None
    if not isinstance(given.get("schema"), dict):
        error = wrong_type("text.format.schema", given.get("schema"), "an object")
        raise ValidationError(error.message, hint=error.hint, field="text")
    if not isinstance(given.get("strict"), bool | None):
        error = wrong_type("text.format.strict", given["strict"], "true or false")
        raise ValidationError(error.message, hint=error.hint, field="text")
    for name, limit in FORMAT_CHARS.items():
        if not isinstance(given.get(name) or "", str) or len(given.get(name) or "") > limit:
            raise ValidationError(
                f"text.format.{name} must be a string of at most {limit} characters", hint="shorten it", field="text"
            )
    return {"type": kind, "json_schema": {name: given[name] for name in FORMAT_KEYS if given.get(name) is not None}}
