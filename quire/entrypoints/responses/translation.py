"""A request for a response as a request for a chat, the representation that all APIs share. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quire.entrypoints.openai.protocol.chat import ChatRequest
from quire.entrypoints.openai.protocol.effort import effort_kwargs
from quire.entrypoints.responses.items import Item, messages_of
from quire.entrypoints.responses.protocol import ResponsesRequest, unsupported_tool, wants_logprobs
from quire.errors import ValidationError
from quire.utils.checks import shown, wrong_type

SAME_NAME = (
    "model", "parallel_tool_calls", "stream", "temperature", "top_p", "top_k", "min_p", "min_tokens",
    "presence_penalty", "frequency_penalty", "repetition_penalty", "seed", "stop", "stop_token_ids",
    "include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "spaces_between_special_tokens", "logit_bias",
    "allowed_token_ids", "bad_words", "structured_outputs", "chat_template", "truncation_side",
    "priority", "queue_timeout", "cache_salt", "no_store", "skip_reading_prefix_cache",
    "vllm_xargs", "thinking_token_budget",
)  # fmt: skip
FIELD_NAMES = {
    "messages": "input", "len(messages)": "input", "prompt": "input", "prompt_token_ids": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens", "response_format": "text", "logprobs": "include",
}  # fmt: skip
"""What a chat calls a field -> what a response does."""
TOOL_KEYS = ("type", "name", "description", "parameters", "strict")
FORMAT_KEYS = ("name", "schema", "strict", "description")
FORMAT_CHARS = {"name": 128, "description": 1 << 16}


def chat_request(
    request: ResponsesRequest, items: Sequence[Item], template: str | None, warnings: list[str]
) -> ChatRequest:
    """`request` as a chat of its whole conversation.

    Args:
        items: of the earlier turns and this one.
        template: source of the chat template that will be used.
        warnings: gets a line for each field that has no effect.

    Raises:
        ValidationError, UnsupportedError: a tool, the choice of one or the form of the text is malformed.
    """
    source = template or ""
    developer_role = "developer" if "developer" in source else "system"
    messages = messages_of(items, developer_role)
    if request.instructions:
        messages.insert(0, {"role": developer_role, "content": request.instructions})
    tools, choice = _tools(request, warnings)
    effort = None if request.reasoning is None else request.reasoning.effort
    return ChatRequest(
        **{name: getattr(request, name) for name in SAME_NAME},
        messages=messages,
        tools=tools,
        tool_choice=choice,
        max_completion_tokens=request.max_output_tokens,
        truncate_prompt_tokens=_cut(request),
        logprobs=True if wants_logprobs(request) else None,
        top_logprobs=request.top_logprobs if wants_logprobs(request) else None,
        response_format=_response_format(request),
        chat_template_kwargs=effort_kwargs("reasoning.effort", effort, request.chat_template_kwargs, source, warnings),
    )


def _cut(request: ResponsesRequest) -> int | None:
    """How much of the prompt is used; with `truncation` auto as much as leaves room for the answer."""
    if request.truncate_prompt_tokens is not None:
        return request.truncate_prompt_tokens
    return -1 if request.truncation == "auto" else None


def text_format(request: ResponsesRequest) -> dict[str, Any]:
    """The form of the text that was asked for, as answers tell it."""
    return (request.text.format if request.text is not None else None) or {"type": "text"}


def told_tools(request: ResponsesRequest) -> list[dict[str, Any]]:
    """The tools that were offered, as answers tell them."""
    return [{name: tool.get(name) for name in TOOL_KEYS} for tool in request.tools or ()]


def told_choice(request: ResponsesRequest) -> str | dict[str, Any]:
    """The choice of a tool, as answers tell it."""
    choice = request.tool_choice or "auto"
    if isinstance(choice, str):
        return choice
    if choice.get("type") == "function":
        return _named(choice["name"])
    names = [tool["name"] for tool in choice["tools"]]
    return {**{name: choice[name] for name in ("type", "mode")}, "tools": [_named(name) for name in names]}


def _named(name: str) -> dict[str, Any]:
    return {"type": "function", "name": name}


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
    for name, limit in FORMAT_CHARS.items():
        if not isinstance(given.get(name) or "", str) or len(given.get(name) or "") > limit:
            raise ValidationError(
                f"text.format.{name} must be a text of at most {limit} characters", hint="shorten it", field="text"
            )
    return {"type": kind, "json_schema": {name: given[name] for name in FORMAT_KEYS if given.get(name) is not None}}


def _tools(
    request: ResponsesRequest, warnings: list[str]
) -> tuple[list[dict[str, Any]] | None, str | dict[str, Any] | None]:
    """(tools, choice) as a chat has them; without tools there is nothing that `auto` could choose."""
    tools = [_tool(f"tools[{index}]", tool, warnings) for index, tool in enumerate(request.tools or ())]
    choice = request.tool_choice
    if not isinstance(choice, dict):
        return tools or None, None if choice == "auto" and not tools else choice
    kind = choice.get("type")
    if kind == "function":
        return tools or None, _chosen(choice)
    if kind != "allowed_tools":
        raise unsupported_tool("tool_choice", kind, "tool_choice")
    mode, allowed = choice.get("mode"), choice.get("tools")
    if mode not in ("auto", "required") or not isinstance(allowed, list) or not allowed:
        raise ValidationError(
            "tool_choice needs mode auto or required, and tools", hint='give {"type": "allowed_tools", "mode": '
            '"auto", "tools": [{"type": "function", "name": ...}]}', field="tool_choice",
        )  # fmt: skip
    return tools or None, {
        "type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [_chosen(one) for one in allowed]}
    }  # fmt: skip


def _chosen(choice: Any) -> dict[str, Any]:
    """A function that is named, as a chat names it."""
    name = choice.get("name") if isinstance(choice, dict) and choice.get("type") == "function" else None
    if not isinstance(name, str):
        raise ValidationError(
            f"tool_choice: {shown(choice)} names no function", hint='give {"type": "function", "name": ...}',
            field="tool_choice",
        )  # fmt: skip
    return {"type": "function", "function": {"name": name}}


def _tool(where: str, tool: dict[str, Any], warnings: list[str]) -> dict[str, Any]:
    """A function, which a chat has one level deeper."""
    if tool.get("type") != "function":
        raise unsupported_tool(where, tool.get("type"))
    if not isinstance(tool.get("name"), str):
        raise ValidationError(f"{where}.name is missing", hint="name the function", field="tools")
    unused = [name for name, value in tool.items() if name not in TOOL_KEYS and value not in (None, False, [], {})]
    warnings += [f"{where}.{name[:40]} has no effect" for name in unused[:4]]
    function = {name: tool[name] for name in TOOL_KEYS if name != "type" and tool.get(name) is not None}
    return {"type": "function", "function": function}
