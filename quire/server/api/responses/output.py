"""OutputItems: an answer's events as the items of a response, and the events of a stream for them.

Used by the writer, for whole answers too: a stream comes to what the whole says because both are made here. Owns the
items of one response.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from quire.parsers.events import Content, Reasoning
from quire.server.api.responses.items import CALLS, Item, new_id
from quire.server.api.responses.tools import Origin, custom_input
from quire.server.chat.answer_events import AnswerEvent, ToolCallDelta, ToolCallStart

StreamEvent = tuple[str, dict[str, Any]]
"""(type, its fields besides `type` and `sequence_number`)."""
Logprobs = list[dict[str, Any]]

NO_ORIGIN = Origin("")
IN_PROGRESS, COMPLETED, INCOMPLETE = "in_progress", "completed", "incomplete"


@dataclass(slots=True)
class _Open:
    """The item that is being written.

    Attributes:
        kind: its type.
        call_id: of a call, with its `name` and `namespace`.
        number: of a message, how many came before it.
    """

    kind: str
    index: int
    item_id: str
    call_id: str = ""
    origin: Origin = NO_ORIGIN
    number: int = 0
    parts: list[str] = field(default_factory=list)

    @property
    def where(self) -> dict[str, Any]:
        """What events say of the item."""
        return {"item_id": self.item_id, "output_index": self.index}


class OutputItems:
    """Collects what comes.

    Args:
        new_logprobs: given the number of a message, the log-probabilities of its tokens that it did not give before;
            None = they are not told.
        all_logprobs: the same for all its tokens so far.
        origins: what functions are to the client.

    Attributes:
        items: the complete ones.
    """

    def __init__(
        self,
        new_logprobs: Callable[[int], Logprobs] = lambda number: [],
        all_logprobs: Callable[[int], Logprobs] = lambda number: [],
        origins: Mapping[str, Origin] | None = None,
    ) -> None:
        self.items: list[Item] = []
        self._new_logprobs = new_logprobs
        self._all_logprobs = all_logprobs
        self._origins = origins or {}
        self._open: _Open | None = None
        self._num_messages = 0

    def push(self, events: Iterable[AnswerEvent]) -> list[StreamEvent]:
        """Take in what was found in the answer."""
        told: list[StreamEvent] = []
        for event in events:
            if isinstance(event, Content):
                told += self._text("message", event.text)
            elif isinstance(event, Reasoning):
                told += self._text("reasoning", event.text)
            elif isinstance(event, ToolCallStart):
                told += self._close(COMPLETED)
                told += self._begin_call(event)
            else:
                told += self._arguments(event)
        return told

    def extend_message(self, text: str) -> str | None:
        """Add to the message that is being written, without log-probabilities; its id, None = none is written."""
        one = self._open
        if one is None or one.kind != "message":
            return None
        one.parts.append(text)
        return one.item_id

    def finish(self, status: str) -> list[StreamEvent]:
        """The answer has ended, its last item with `status`; one that says nothing has an empty message."""
        told = [] if self.items or self._open is not None else self._begin("message")
        return told + self._close(status)

    def snapshot(self) -> list[Item]:
        """The items so far, with the one that is being written."""
        return self.items if self._open is None else [*self.items, self._item(self._open, IN_PROGRESS)]

    def _text(self, kind: str, text: str) -> list[StreamEvent]:
        told: list[StreamEvent] = []
        if self._open is None or self._open.kind != kind:
            told = [*self._close(COMPLETED), *self._begin(kind)]
        one = self._open
        assert one is not None, "it was begun"
        one.parts.append(text)
        delta: dict[str, Any] = {**one.where, "content_index": 0, "delta": text}
        if kind == "reasoning":
            told.append(("response.reasoning_text.delta", delta))
        else:
            delta["logprobs"] = self._new_logprobs(one.number)
            told.append(("response.output_text.delta", delta))
        return told

    def _arguments(self, event: ToolCallDelta) -> list[StreamEvent]:
        one = self._open
        assert one is not None and one.kind in CALLS, "parts follow the beginning of their call"
        one.parts.append(event.text)
        if one.origin.is_custom:  # its input is sent when it is complete
            return []
        return [("response.function_call_arguments.delta", {**one.where, "delta": event.text})]

    def _begin_call(self, event: ToolCallStart) -> list[StreamEvent]:
        origin = self._origins.get(event.name) or Origin(event.name)
        kind = CALLS[origin.is_custom]
        one = self._open = _Open(kind, len(self.items), new_id(kind), event.call_id, origin)
        return [("response.output_item.added", {"output_index": one.index, "item": self._item(one, IN_PROGRESS)})]

    def _begin(self, kind: str) -> list[StreamEvent]:
        one = self._open = _Open(kind, len(self.items), new_id(kind), number=self._num_messages)
        item = self._item(one, IN_PROGRESS)
        (part,) = item["content"]
        item["content"] = []
        if kind == "message":
            self._num_messages += 1
        return [
            ("response.output_item.added", {"output_index": one.index, "item": item}),
            ("response.content_part.added", {**one.where, "content_index": 0, "part": part}),
        ]

    def _close(self, status: str) -> list[StreamEvent]:
        one, self._open = self._open, None
        if one is None:
            return []
        item = self._item(one, status)
        self.items.append(item)
        done = ("response.output_item.done", {"output_index": one.index, "item": item})
        if one.origin.is_custom:
            custom = "response.custom_tool_call_input"
            text = item["input"]
            return [
                (f"{custom}.delta", {**one.where, "delta": text}),
                (f"{custom}.done", {**one.where, "input": text}),
                done,
            ]
        if one.kind == "function_call":
            arguments = {**one.where, "name": item["name"], "arguments": item["arguments"]}
            return [("response.function_call_arguments.done", arguments), done]
        (part,) = item["content"]
        whole: dict[str, Any] = {**one.where, "content_index": 0, "text": part["text"]}
        name = "response.reasoning_text.done"
        if one.kind == "message":
            name, whole["logprobs"] = "response.output_text.done", part["logprobs"]
        return [(name, whole), ("response.content_part.done", {**one.where, "content_index": 0, "part": part}), done]

    def _item(self, one: _Open, status: str) -> Item:
        """The item as it is so far."""
        text = "".join(one.parts)
        item: Item = {"id": one.item_id, "type": one.kind, "status": status}
        if one.kind in CALLS:
            call = {**item, "call_id": one.call_id, "name": one.origin.name}
            if one.origin.namespace is not None:
                call["namespace"] = one.origin.namespace
            if one.origin.is_custom:
                return {**call, "input": custom_input(text) if text else ""}
            return {**call, "arguments": text}
        if one.kind == "reasoning":
            return {**item, "summary": [], "content": [{"type": "reasoning_text", "text": text}]}
        part = {"type": "output_text", "text": text, "annotations": [], "logprobs": self._all_logprobs(one.number)}
        return {**item, "role": "assistant", "content": [part]}
