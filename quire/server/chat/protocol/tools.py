"""`tools`, `tool_choice` and `parallel_tool_calls` of a chat. No state."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any

from quire.errors import UnsupportedError, ValidationError, unknown_name
from quire.server.chat.protocol.chat import ChatFields, ChatRequest
from quire.utils.checks import shown, wrong_type

TOOL_NAME = re.compile(r"[\w.:/-]{1,128}", re.ASCII)
CHOICE_FIELD, TOOLS_FIELD = "tool_choice", "tools"
FORMS = (
    'use "auto", "none", "required", {"type": "function", "function": {"name": ...}} or '
    '{"type": "allowed_tools", "allowed_tools": {"mode": "auto" or "required", "tools": [...]}}'
)
Tool = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Which calls an answer may have.

    Attributes:
        tools: that may be called; the template may show others, too.
        is_required: the answer is calls and nothing else.
        is_one: it has one call at most.
    """

    tools: Sequence[Tool] = ()
    is_required: bool = False
    is_one: bool = False


def tool_choice(request: ChatFields, *, can_parse: bool, can_force: bool) -> ToolChoice:
    """The calls that the answer to `request` may have.

    Args:
        can_parse: calls can be read out of an answer that has them of its own accord.
        can_force: calls can be read at all.

    Raises:
        ValidationError: the tools or the choice are malformed, or a tool is missing.
        UnsupportedError: calls cannot be read.
    """
    mode, names, is_one = _mode(request.tool_choice)
    if request.tools is not None and not request.tools:
        raise ValidationError("tools is empty", hint="leave it out, or add a tool", field="tools")
    if not request.tools or mode == "none":
        if mode != "none" and request.tool_choice is not None:
            raise ValidationError(
                f"tool_choice is {mode}, but there are no tools", hint="set tools", field=CHOICE_FIELD
            )
        return ToolChoice()
    if not (can_force if mode == "required" else can_parse):
        raise UnsupportedError(
            "tools: this server does not parse tool calls",
            hint="start it with --tool-call-parser and --enable-auto-tool-choice, or send tool_choice=none: "
            "then tools are only shown to the model, and the output is plain text",
            field="tools",
        )
    for position, tool in enumerate(request.tools):
        _check_tool(f"tools[{position}]", tool)
    if isinstance(request, ChatRequest) and request.parallel_tool_calls is False:
        is_one = True
    return ToolChoice(_named(request.tools, names), is_required=mode == "required", is_one=is_one)


def repeated_names(tools: Sequence[Tool]) -> Iterator[tuple[int, int]]:
    """(number, number of the first) of each of these valid tools whose name an earlier one has."""
    first: dict[str, int] = {}
    for number, tool in enumerate(tools):
        earlier = first.setdefault(tool["function"]["name"], number)
        if earlier != number:
            yield number, earlier


def _mode(choice: Any) -> tuple[str, list[str] | None, bool]:
    """(auto, none or required; names of the tools that may be called, None = all; whether exactly one is meant)."""
    if choice is None:
        return "auto", None, False
    if isinstance(choice, str):
        if choice in ("auto", "none", "required"):
            return choice, None, False
    elif choice.get("type") == "function":
        return "required", [_name_of(choice)], True
    elif choice.get("type") == "allowed_tools":
        allowed = choice.get("allowed_tools")
        if isinstance(allowed, dict) and allowed.get("mode") in ("auto", "required"):
            tools = allowed.get("tools")
            if isinstance(tools, list) and tools:
                return allowed["mode"], [_name_of(tool) for tool in tools], False
    raise ValidationError(f"tool_choice {shown(choice)} is not valid", hint=FORMS, field=CHOICE_FIELD)


def _name_of(choice: Any) -> str:
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise ValidationError(f"tool_choice: {shown(choice)} does not name a function", hint=FORMS, field=CHOICE_FIELD)
    return name


def _named(tools: list[Tool], names: list[str] | None) -> list[Tool]:
    """Those of `tools` that may be called."""
    if names is None:
        return tools
    known = [tool["function"]["name"] for tool in tools]
    for name in names:
        if name not in known:
            error = unknown_name("tool", name, known, ValidationError)
            raise ValidationError(f"tool_choice: {error.message}", hint=error.hint, field=CHOICE_FIELD)
    return [tool for tool in tools if tool["function"]["name"] in names]


def _check_tool(where: str, tool: Tool) -> None:
    function = tool.get("function")
    if tool.get("type", "function") != "function" or not isinstance(function, dict):
        raise ValidationError(
            f"{where} is not a function", hint='give {"type": "function", "function": {"name": ...}}', field="tools"
        )
    name = function.get("name")
    if not isinstance(name, str) or not TOOL_NAME.fullmatch(name):
        raise ValidationError(
            f"{where}.function.name is {shown(name)}; 1 to 128 letters, digits, _ - . : / are allowed", field="tools"
        )
    if not isinstance(function.get("parameters", {}), (dict, NoneType)):
        raise ValidationError(f"{where}.function.parameters is not a JSON schema", hint="send an object", field="tools")
    for key, kind, expected in (("strict", bool, "true or false"), ("description", str, "a string")):
        if not isinstance(function.get(key), (kind, NoneType)):
            error = wrong_type(f"{where}.function.{key}", function[key], expected)
            raise ValidationError(error.message, hint=error.hint, field="tools")
