"""Calls that are whole: a client parses the arguments of a tool_use block as they come, so what is broken or cut must
not become one. `ToolCallBuffer` owns the call that is being written.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from quire.parsers.events import Content, Reasoning
from quire.server.chat.answer_events import AnswerEvent, ToolCallDelta, ToolCallStart

CHAT_ID, TOOL_ID = "call_", "toolu_"


@dataclass(frozen=True, slots=True)
class Call:
    """A call; `arguments` is the text of a JSON object."""

    call_id: str
    name: str
    arguments: str


MessageEvent = Content | Reasoning | Call


class ToolCallBuffer:
    """Makes one event of each call."""

    def __init__(self) -> None:
        self._begun: ToolCallStart | None = None
        self._parts: list[str] = []

    def push(self, events: Iterable[AnswerEvent], *, is_end: bool) -> list[MessageEvent]:
        """The next events of an answer; those that are decided by now. A call with broken arguments is content."""
        told: list[MessageEvent] = []
        for event in events:
            if isinstance(event, ToolCallDelta):
                self._parts.append(event.text)
                continue
            told += self._ended()
            if isinstance(event, ToolCallStart):
                self._begun = event
            else:
                told.append(event)
        if is_end or self._is_whole():
            told += self._ended()
        return told

    def _is_whole(self) -> bool:
        return bool(self._parts) and self._parts[-1].endswith("}") and is_object("".join(self._parts))

    def _ended(self) -> list[MessageEvent]:
        """The call that nothing more comes to."""
        begun, arguments = self._begun, "".join(self._parts) or "{}"
        self._begun, self._parts = None, []
        if begun is None:
            return []
        if not is_object(arguments):
            return [Content(f"{begun.name} {arguments}")]
        call_id = begun.call_id
        if call_id.startswith(CHAT_ID):
            call_id = TOOL_ID + call_id.removeprefix(CHAT_ID)
        return [Call(call_id, begun.name, arguments)]


def is_object(text: str) -> bool:
    """True when `text` is a JSON object that every client can read."""
    try:
        return isinstance(msgspec.json.decode(text.encode()), dict)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return False
