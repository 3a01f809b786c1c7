"""A Messages request as a `ChatRequest`. Pure functions."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from quire.config.server import LimitsConfig
from quire.errors import ValidationError
from quire.server.api.anthropic.conversation import Conversation
from quire.server.api.anthropic.parts import kind_of, read_part
from quire.server.api.anthropic.protocol import MessagesRequest
from quire.server.api.anthropic.tools import chat_choice, chat_tools
from quire.server.chat.protocol.chat import ChatRequest
from quire.server.chat.protocol.fields import shared
from quire.server.chat.protocol.warnings import Warnings
from quire.utils.checks import check_int

MIN_BUDGET = 1024
BUDGET, NO_BUDGET = (
    "thinking_token_budget",
    "thinking.budget_tokens has no effect: the reasoning format has no end delimiter",
)
THINKING = ("enabled", "disabled", "adaptive")
DISPLAYS = (None, "summarized", "omitted")
OLD_FORM_FIELD, FORM_FIELD = "output_format", "output_config.format"


class MessagesChat(ChatRequest, kw_only=True):
    """The chat of a Messages request."""

    form_field: ClassVar[str] = FORM_FIELD


class OldFormChat(ChatRequest, kw_only=True):
    """That of one whose form has its earlier name."""

    form_field: ClassVar[str] = OLD_FORM_FIELD


class Thinking(msgspec.Struct):
    """Whether the model is to think."""

    budget_tokens: int | None = None
    display: str | None = None


class OutputConfig(msgspec.Struct):
    """The form of the answer."""

    format: dict[str, Any] | None = None


class JsonFormat(msgspec.Struct):
    """JSON of a schema."""

    schema: dict[str, Any]


def chat_request(
    body: MessagesRequest, warnings: Warnings, limits: LimitsConfig, *, can_end_reasoning: bool = True
) -> ChatRequest:
    """The chat that `body` asks for.

    Args:
        can_end_reasoning: the server can keep a budget of thinking; else it has no effect.

    Raises:
        ValidationError, UnsupportedError: something in it is malformed, missing, or cannot be done.
    """
    if body.max_tokens is None:
        raise ValidationError(
            "max_tokens is missing", hint="set the maximum number of output tokens", field="max_tokens"
        )
    check_int("max_tokens", body.max_tokens, 1)
    num_stops = len(body.stop_sequences or ())
    if num_stops > limits.max_stop_strings:
        raise ValidationError(
            f"stop_sequences has {num_stops} entries, at most {limits.max_stop_strings} are allowed",
            field="stop_sequences",
        )
    thinking = _thinking(body, warnings)
    if thinking.get(BUDGET) is not None and not can_end_reasoning:
        del thinking[BUDGET]
        warnings.add("thinking", NO_BUDGET)
    translated = {**_prompt(body, warnings), **_form(body, warnings), **thinking, "stop": body.stop_sequences or None}
    chat = MessagesChat if body.output_format is None else OldFormChat
    return chat(**{**shared(body, ChatRequest), **translated})


def chat_prompt(body: MessagesRequest, warnings: Warnings) -> ChatRequest:
    """The chat whose prompt is that of a request with these fields.

    Raises:
        ValidationError, UnsupportedError: as `chat_request`.
    """
    _form(body, warnings)
    return ChatRequest(**_prompt(body, warnings), **_thinking(body, warnings))


def asks_for_thinking(body: MessagesRequest) -> bool:
    """True when the model is asked to reason, so that an answer without is a surprise."""
    return (body.thinking or {}).get("type") == "enabled"


def _prompt(body: MessagesRequest, warnings: Warnings) -> dict[str, Any]:
    """The fields that make the prompt, but for those of thinking."""
    conversation = Conversation(warnings)
    if body.system is not None:
        conversation.add_system("system", body.system)
    for index, message in enumerate(body.messages or ()):
        conversation.add(f"messages[{index}]", message)
    if not body.messages:
        raise ValidationError(
            "messages is missing or empty", hint='give [{"role": "user", "content": ...}]', field="messages"
        )
    tools = chat_tools(body.tools, warnings)
    choice, parallel = chat_choice(body.tool_choice, tools, warnings)
    return {
        "model": body.model,
        "messages": conversation.messages(),
        "continue_final_message": conversation.continues_last() or None,
        "tools": tools,
        "tool_choice": choice,
        "parallel_tool_calls": parallel,
        "chat_template": body.chat_template,
        "documents": body.documents,
    }


def _thinking(body: MessagesRequest, warnings: Warnings) -> dict[str, Any]:
    """The fields of thinking: templates that can turn it on and off do so by one of two variables."""
    kwargs = body.chat_template_kwargs
    if body.thinking is None:
        return {"chat_template_kwargs": kwargs}
    kind = kind_of("thinking", body.thinking, THINKING, f"type is one of {', '.join(THINKING)}")
    given = read_part("thinking", body.thinking, Thinking, warnings)
    if given.display not in DISPLAYS:
        raise ValidationError(
            f"thinking.display={given.display!r} is unknown", hint="use summarized or omitted", field="thinking"
        )
    if kind == "enabled":
        _check_budget(given.budget_tokens, body.max_tokens)
    elif given.budget_tokens is not None:
        raise ValidationError(
            f"thinking.budget_tokens with type={kind}", hint="leave it out, or use type=enabled", field="thinking"
        )
    if kind != "adaptive":
        kwargs = {"enable_thinking": kind == "enabled", "thinking": kind == "enabled", **(kwargs or {})}
    shows = None if kind != "disabled" and given.display != "omitted" else False
    return {"chat_template_kwargs": kwargs, "include_reasoning": shows, BUDGET: given.budget_tokens}


def _check_budget(budget: int | None, max_tokens: int | None) -> None:
    if budget is None:
        raise ValidationError("thinking.budget_tokens is missing", hint=f"use at least {MIN_BUDGET}", field="thinking")
    check_int("thinking.budget_tokens", budget, MIN_BUDGET)
    if max_tokens is not None and budget >= max_tokens:
        raise ValidationError(
            f"thinking.budget_tokens={budget} is not less than max_tokens={max_tokens}",
            hint="thinking is part of the output: use a smaller budget or larger max_tokens", field="thinking",
        )  # fmt: skip


def _form(body: MessagesRequest, warnings: Warnings) -> dict[str, Any]:
    """The form of the answer."""
    form, where = body.output_format, OLD_FORM_FIELD
    if body.output_config is not None:
        config = read_part("output_config", body.output_config, OutputConfig, warnings, {"effort": ()})
        if config.format is not None:
            if form is not None:
                raise ValidationError(
                    f"{OLD_FORM_FIELD} and {FORM_FIELD} both constrain the output",
                    hint="leave out one of them", field=OLD_FORM_FIELD,
                )  # fmt: skip
            form, where = config.format, FORM_FIELD
    if form is None:
        return {}
    kind_of(where, form, ("json_schema",), "use json_schema")
    schema = read_part(where, form, JsonFormat, warnings).schema
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}}
