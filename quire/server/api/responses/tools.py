"""The tools of a response as functions of a chat, and the names of calls back. Pure functions.

A namespace's functions are `<namespace>__<name>`; a custom tool, whose input is free text, is a function with one text.
What runs on OpenAI's own servers is left out, and said.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from quire.errors import UnsupportedError, ValidationError
from quire.server.chat.protocol.warnings import Warnings
from quire.utils.checks import shown

Tool = dict[str, Any]

FUNCTION, CUSTOM, NAMESPACE = "function", "custom", "namespace"
ADDITIONAL = "additional_tools"
TOOL_KEYS = ("type", "name", "description", "parameters", "strict")
SERVER_SIDE = (
    "web_search", "file_search", "code_interpreter", "image_generation", "computer", "mcp", "local_shell", "shell",
    "apply_patch", "tool_search",
)  # fmt: skip
"""Beginnings of the types of tools that somebody else than the client runs, or whose form a model must have learned."""
INPUT = "input"
MAX_GRAMMAR_CHARS = 1 << 16


@dataclass(frozen=True, slots=True)
class Origin:
    """What a function of a chat is to the client."""

    name: str
    namespace: str | None = None
    is_custom: bool = False


def flat_name(namespace: str | None, name: str) -> str:
    """The name of a function in a chat."""
    return f"{namespace}__{name}" if namespace else name


def custom_arguments(text: str) -> str:
    """The arguments of a chat's call that is one of a custom tool."""
    return msgspec.json.encode({INPUT: text}).decode()


def custom_input(arguments: str) -> str:
    """The input of a custom tool in the arguments that a model wrote; those themselves where they were cut."""
    try:
        text = msgspec.json.decode(arguments)[INPUT]
    except (msgspec.DecodeError, KeyError, TypeError, RecursionError):
        return arguments
    return text if isinstance(text, str) else arguments


def with_additional_tools(
    tools: list[Tool] | None, given: str | list[dict[str, Any]] | None
) -> tuple[list[Tool] | None, str | list[dict[str, Any]] | None]:
    """(tools with those of `additional_tools` items, the input without these items).

    The model can call them from the beginning, wherever in the input they come.

    Raises:
        ValidationError: such an item has no list of tools.
    """
    if not isinstance(given, list) or all(item.get("type") != ADDITIONAL for item in given):
        return tools, given
    tools, items = list(tools or ()), []
    for number, item in enumerate(given):
        if item.get("type") != ADDITIONAL:
            items.append(item)
            continue
        more = item.get("tools")
        if not isinstance(more, list) or not all(isinstance(tool, dict) for tool in more):
            raise ValidationError(f"input[{number}].tools must be a list of tools", hint="set tools", field="input")
        tools += more
    return tools, items


def origins_of(tools: list[Tool] | None) -> dict[str, Origin]:
    """The functions that a chat with these tools has, by their names there.

    Raises:
        ValidationError, UnsupportedError: a tool is malformed, or two have the same name there.
    """
    origins: dict[str, Origin] = {}
    for where, namespace, tool in _each(tools, Warnings()):
        origin = Origin(tool["name"], None if namespace is None else namespace["name"], tool["type"] == CUSTOM)
        flat = flat_name(origin.namespace, origin.name)
        if origins.setdefault(flat, origin) != origin:
            raise ValidationError(f"{where}: duplicate tool name {shown(flat)}", hint="rename it", field="tools")
    return origins


def chat_tools(tools: list[Tool] | None, warnings: Warnings) -> list[Tool]:
    """The functions of a chat.

    Args:
        warnings: gets each tool that is left out and each field that has no effect.

    Raises:
        ValidationError, UnsupportedError: as `origins_of`.
    """
    functions = []
    for where, namespace, tool in _each(tools, warnings):
        made = _custom(where, tool, warnings) if tool["type"] == CUSTOM else _function(where, tool, warnings)
        if namespace is not None:
            made["name"] = flat_name(namespace["name"], made["name"])
            texts = [one for one in (namespace.get("description"), made.get("description")) if one]
            if texts:
                made["description"] = "\n".join(map(str, texts))
        functions.append({"type": FUNCTION, FUNCTION: made})
    return functions


def chat_choice(choice: str | dict[str, Any] | None, *, has_tools: bool) -> str | dict[str, Any] | None:
    """`tool_choice` of a chat; without tools there is nothing that `auto` could choose.

    Raises:
        ValidationError, UnsupportedError: it is malformed, or asks for a tool that is not there.
    """
    if not isinstance(choice, dict):
        return None if choice == "auto" and not has_tools else choice
    kind = choice.get("type")
    if kind in (FUNCTION, CUSTOM):
        return _chosen(choice)
    if kind != "allowed_tools":
        raise unsupported_tool("tool_choice", kind, "tool_choice")
    mode, allowed = choice.get("mode"), choice.get("tools")
    if mode not in ("auto", "required") or not isinstance(allowed, list) or not allowed:
        raise ValidationError(
            "tool_choice needs tools and a mode, auto or required", hint='give {"type": "allowed_tools", "mode": '
            '"auto", "tools": [{"type": "function", "name": ...}]}', field="tool_choice",
        )  # fmt: skip
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [_chosen(one) for one in allowed]}}


def echo_tools(tools: list[Tool] | None) -> list[Tool]:
    """The tools that were offered, as responses return them."""
    return [{name: tool.get(name) for name in TOOL_KEYS} if tool["type"] == FUNCTION else tool for tool in tools or ()]


def echo_tool_choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any]:
    """The choice of a tool, as responses return it."""
    if choice is None or isinstance(choice, str):
        return choice or "auto"
    if choice.get("type") != "allowed_tools":
        return _echoed(choice)
    return {"type": "allowed_tools", "mode": choice["mode"], "tools": [_echoed(tool) for tool in choice["tools"]]}


def unsupported_tool(where: str, kind: object, field: str = "tools") -> UnsupportedError:
    """The refusal of a tool, or of the choice of one, that is not there."""
    return UnsupportedError(
        f"{where}.type={shown(kind)} is not supported; supported tools are functions, custom tools and "
            "namespaces of them",
        hint='use {"type": "function", "name": ...}', field=field,
    )  # fmt: skip


def _echoed(choice: dict[str, Any]) -> dict[str, Any]:
    return {name: choice[name] for name in ("type", "name", "namespace") if name in choice}


def _each(tools: list[Tool] | None, warnings: Warnings) -> Iterator[tuple[str, Tool | None, Tool]]:
    """(place, namespace, tool) of each function and custom tool."""
    for number, tool in enumerate(tools or ()):
        where, kind = f"tools[{number}]", tool.get("type")
        if kind == NAMESPACE:
            inner = tool.get("tools")
            _check_name(where, tool)
            if not isinstance(inner, list):
                raise ValidationError(f"{where}.tools is missing", hint="send a list of functions", field="tools")
            for index, one in enumerate(inner):
                place = f"{where}.tools[{index}]"
                if not isinstance(one, dict) or one.get("type") not in (FUNCTION, CUSTOM):
                    raise unsupported_tool(place, one.get("type") if isinstance(one, dict) else one)
                _check_name(place, one)
                yield place, tool, one
        elif kind in (FUNCTION, CUSTOM):
            _check_name(where, tool)
            yield where, None, tool
        elif isinstance(kind, str) and kind.startswith(SERVER_SIDE):
            warnings.add(where, f"{where}: {kind[:40]} is ignored: this server does not run tools")
        else:
            raise unsupported_tool(where, kind)


def _check_name(where: str, tool: Tool) -> None:
    if not isinstance(tool.get("name"), str) or not tool["name"]:
        raise ValidationError(f"{where}.name is missing", hint="set the name of the tool", field="tools")


def _function(where: str, tool: Tool, warnings: Warnings) -> Tool:
    """A function, which a chat has one level deeper."""
    _warn_of_rest(where, tool, TOOL_KEYS, warnings)
    return {name: tool[name] for name in TOOL_KEYS if name != "type" and tool.get(name) is not None}


def _custom(where: str, tool: Tool, warnings: Warnings) -> Tool:
    """A function whose one argument is the input; a grammar of the input is described to the model."""
    _warn_of_rest(where, tool, ("type", "name", "description", "format"), warnings)
    description, form = str(tool.get("description") or ""), tool.get("format")
    if isinstance(form, dict) and form.get("type") == "grammar":
        grammar = str(form.get("definition") or "")[:MAX_GRAMMAR_CHARS]
        description += f"\nThe input follows this {form.get('syntax')} grammar:\n{grammar}"
        warnings.add(f"{where}.format", f"{where}.format: the grammar is described to the model but not enforced")
    schema = {"type": "object", "properties": {INPUT: {"type": "string"}}, "required": [INPUT]}
    return {"name": tool["name"], "description": description.strip(), "parameters": schema}


def _warn_of_rest(where: str, tool: Tool, known: tuple[str, ...], warnings: Warnings) -> None:
    unused = [name for name, value in tool.items() if name not in known and value not in (None, False, [], {})]
    for name in unused[:4]:
        warnings.add(f"{where}.{name[:40]}", f"{where}.{name[:40]} has no effect")


def _chosen(choice: Any) -> dict[str, Any]:
    """A tool that is named, as a chat names it."""
    name = choice.get("name") if isinstance(choice, dict) and choice.get("type") in (FUNCTION, CUSTOM) else None
    if not isinstance(name, str):
        raise ValidationError(
            f"tool_choice: {shown(choice)} does not name a function", hint='give {"type": "function", "name": ...}',
            field="tool_choice",
        )  # fmt: skip
    namespace = choice.get("namespace")
    return {"type": FUNCTION, FUNCTION: {"name": flat_name(namespace if isinstance(namespace, str) else None, name)}}
