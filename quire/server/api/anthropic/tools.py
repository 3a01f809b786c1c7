"""Tools and the choice of one, as chats have them. Pure functions."""

from __future__ import annotations

from typing import Any

import msgspec

from quire.errors import UnsupportedError, ValidationError, unknown_name
from quire.server.api.anthropic.parts import kind_of, read_part
from quire.server.chat.protocol.tools import repeated_names
from quire.server.chat.protocol.warnings import Warnings
from quire.utils.checks import shown, wrong_type

CHOICES = ("auto", "any", "tool", "none")
NO_EFFECT = {
    "cache_control": (),
    "allowed_callers": (["direct"],),
    "defer_loading": (False,),
    "eager_input_streaming": (False,),
    "input_examples": ([],),
}


class Tool(msgspec.Struct):
    """A tool that the client runs."""

    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None


class Choice(msgspec.Struct):
    """Whether a tool is to be called."""

    name: str | None = None
    disable_parallel_tool_use: bool | None = None


def chat_tools(tools: list[Any] | None, warnings: Warnings) -> list[dict[str, Any]] | None:
    """The tools; None when there are none.

    Raises:
        ValidationError: one is malformed, or has the name of another.
        UnsupportedError: one is the provider's own.
    """
    made = [_chat_tool(f"tools[{index}]", tool, warnings) for index, tool in enumerate(tools or ())]
    for number, first in repeated_names(made):
        field = f"tools[{number}].name"
        raise ValidationError(f"{field} is that of tools[{first}], too", hint="names of tools are unique", field=field)
    return made or None


def chat_choice(
    choice: dict[str, Any] | None, tools: list[dict[str, Any]] | None, warnings: Warnings
) -> tuple[str | dict[str, Any] | None, bool | None]:
    """(`tool_choice`, `parallel_tool_calls`) of a chat with these tools.

    Raises:
        ValidationError: the choice is malformed, or is of a tool that is not there.
    """
    if choice is None:
        return None, None
    kind = kind_of("tool_choice", choice, CHOICES, f"type is one of {', '.join(CHOICES)}")
    given = read_part("tool_choice", choice, Choice, warnings)
    if (given.name is not None) != (kind == "tool"):
        raise ValidationError(
            f"tool_choice.name={shown(given.name)} with type={kind}", hint='give {"type": "tool", "name": ...}',
            field="tool_choice",
        )  # fmt: skip
    if tools is None:
        if kind in ("any", "tool"):
            raise ValidationError(f"tool_choice is {kind}, but there are no tools", hint="set tools", field="tools")
        return None, None
    parallel = False if given.disable_parallel_tool_use else None
    if kind == "tool":
        names = [tool["function"]["name"] for tool in tools]
        if given.name not in names:
            raise unknown_name("tool", str(given.name), names, ValidationError, field="tool_choice")
        return {"type": "function", "function": {"name": given.name}}, parallel
    return {"auto": "auto", "any": "required", "none": "none"}[kind], parallel


def _chat_tool(where: str, tool: Any, warnings: Warnings) -> dict[str, Any]:
    if not isinstance(tool, dict):
        raise wrong_type(where, tool, "an object")
    if tool.get("type") not in (None, "custom"):
        raise UnsupportedError(
            f"{where} is of type {shown(tool['type'])}, a server-side tool of the provider",
            hint="use tools with name, description and input_schema", field=where,
        )  # fmt: skip
    given = read_part(where, tool, Tool, warnings, NO_EFFECT)
    function: dict[str, Any] = {"name": given.name}
    if given.description is not None:
        function["description"] = given.description
    function["parameters"] = given.input_schema
    if given.strict is not None:
        function["strict"] = given.strict
    return {"type": "function", "function": function}
