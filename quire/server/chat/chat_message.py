"""An answer's events in the form of chats: deltas of a stream, or one message. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quire.parsers.events import Content, Reasoning
from quire.server.chat.answer_events import AnswerEvent, ToolCallDelta, ToolCallStart


def delta_of(event: AnswerEvent) -> dict[str, Any]:
    """One event as the `delta` of a chunk."""
    if isinstance(event, Content):
        return {"content": event.text}
    if isinstance(event, Reasoning):
        return {"reasoning": event.text}
    if isinstance(event, ToolCallDelta):
        return {"tool_calls": [{"index": event.index, "function": {"arguments": event.text}}]}
    function = {"name": event.name, "arguments": ""}
    return {"tool_calls": [{"index": event.index, "id": event.call_id, "type": "function", "function": function}]}


def message_of(events: Sequence[AnswerEvent]) -> dict[str, Any]:
    """What a stream's events come to: `content`, `reasoning` (None without) and, where there are any, `tool_calls`."""
    text = "".join(event.text for event in events if isinstance(event, Content))
    thinking = "".join(event.text for event in events if isinstance(event, Reasoning))
    parts: dict[int, list[str]] = {}
    for event in events:
        if isinstance(event, ToolCallDelta):
            parts.setdefault(event.index, []).append(event.text)
    calls = [
        {
            "id": event.call_id, "type": "function",
            "function": {"name": event.name, "arguments": "".join(parts.get(event.index, ()))},
        }
        for event in events
        if isinstance(event, ToolCallStart)
    ]  # fmt: skip
    message: dict[str, Any] = {"content": text or (None if calls or thinking else ""), "reasoning": thinking or None}
    return {**message, "tool_calls": calls} if calls else message
