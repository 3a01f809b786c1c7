"""Chat messages and tools in the form a chat template reads. Called by `ChatTemplate.render`; no state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quire.core.inputs import parse_messages
from quire.errors import ChatTemplateError

CONTINUE_MARK = "\ue000continue here\ue001"


def template_messages(messages: Any, *, as_parts: bool) -> list[dict[str, Any]]:
    """Checked copies of `messages`, plain data only.

    Args:
        messages: OpenAI-shaped messages.
        as_parts: contents become lists of one text part, for templates that loop over parts.

    Raises:
        ValidationError, UnsupportedError: as `core.inputs.parse_messages`.
        ChatTemplateError: the arguments of a tool call hold something that is not plain data.
    """
    plain: list[dict[str, Any]] = plain_value([dict(message) for message in parse_messages(messages)], "messages")
    if as_parts:
        for message in plain:
            if message.get("content") is not None:
                message["content"] = [{"type": "text", "text": message["content"]}]
    return plain


def template_tools(tools: Any) -> list[Any] | None:
    """A plain copy of function descriptions; None when there are none."""
    if not tools:
        return None
    if not isinstance(tools, Sequence) or not all(isinstance(tool, Mapping) for tool in tools):
        raise ChatTemplateError(
            "tools must be a list of function descriptions",
            hint='for example [{"type": "function", "function": {"name": ..., "parameters": {...}}}]',
            field="tools",
        )
    return [plain_value(tool, f"tools[{position}]") for position, tool in enumerate(tools)]


def mark_last_message(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """`messages` with a mark at the end of the last one's text."""
    last = dict(messages[-1])
    content = last.get("content")
    if isinstance(content, str):
        last["content"] = content + CONTINUE_MARK
    elif content:
        last["content"] = [*content[:-1], {**content[-1], "text": content[-1]["text"] + CONTINUE_MARK}]
    else:
        raise ChatTemplateError(
            "the last message has no text to continue", hint="give it text content", field="continue_final_message"
        )
    return [*messages[:-1], last]


def cut_at_mark(text: str) -> str:
    """The rendered text up to the mark that `mark_last_message` left."""
    before, found, _ = text.partition(CONTINUE_MARK)
    if not found:
        raise ChatTemplateError(
            "the chat template does not render the last message, so it cannot be continued",
            hint="use add_generation_prompt=True instead of continue_final_message=True",
            field="continue_final_message",
        )
    return before


def plain_value(value: Any, where: str) -> Any:
    """A copy of `value` made of dict, list, str, int, float, bool and None only; anything else is refused."""
    if value is None or type(value) in (str, bool, int, float):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain_value(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_value(item, f"{where}[{position}]") for position, item in enumerate(value)]
    raise ChatTemplateError(
        f"{where} is a {type(value).__name__}; only strings, numbers, lists and mappings are allowed", field=where
    )
