"""Output: the events of one answer, put together from what a parser reads.

Owned by a parser. White space around a mark-up (a call, the end of the reasoning) belongs to it and is left out.
"""

from __future__ import annotations

from quire.parsers.events import CallArguments, CallBegin, Content, Event, Reasoning
from quire.parsers.reader import SPACES, Sink

MAX_HELD_SPACES = 256


class Trimmed:
    """Text whose white space is held back until something follows it.

    Args:
        sink: gets the text.
    """

    __slots__ = ("_drops_spaces", "_is_long_run", "_sink", "_spaces")

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._spaces = ""
        self._drops_spaces = False
        self._is_long_run = False

    def write(self, text: str) -> None:
        """More text."""
        if self._drops_spaces:
            text = text.lstrip(SPACES)
            if not text:
                return
            self._drops_spaces = False
        body = text.rstrip(SPACES)
        spaces = text[len(body) :]
        if body:
            self._sink(self._spaces + body)
            self._spaces, self._is_long_run = "", False
        if self._is_long_run:
            if spaces:
                self._sink(spaces)
            return
        self._spaces += spaces
        if len(self._spaces) > MAX_HELD_SPACES:  # text after all
            self._sink(self._spaces)
            self._spaces, self._is_long_run = "", True

    def trim(self) -> None:
        """Leave out the white space at this place."""
        self._spaces, self._is_long_run, self._drops_spaces = "", False, True

    def finish(self) -> None:
        """Nothing follows: what was held back is text."""
        if self._spaces:
            self._sink(self._spaces)
            self._spaces = ""


class Output:
    """Events, neighbours of one kind merged.

    Args:
        buffers_tool_calls: emit a call only when it is complete.
    """

    __slots__ = (
        "_begun",
        "_content",
        "_events",
        "_held",
        "_is_open",
        "_pieces",
        "_reasoning",
        "_type",
        "buffers_tool_calls",
    )

    def __init__(self, *, buffers_tool_calls: bool = False) -> None:
        self.buffers_tool_calls = buffers_tool_calls
        self._events: list[Event] = []
        self._type: type[Content | Reasoning | CallArguments] = Content
        self._pieces: list[str] = []
        self._begun = CallBegin("")
        self._held: list[str] = []
        self._is_open = False
        self._content = Trimmed(lambda text: self._put(Content, text))
        self._reasoning = Trimmed(lambda text: self._put(Reasoning, text))

    def content(self, text: str) -> None:
        """Text of the answer."""
        self._content.write(text)

    def reasoning(self, text: str) -> None:
        """Text of the reasoning."""
        self._reasoning.write(text)

    def trim(self) -> None:
        """A mark-up is here: white space around it is no text."""
        self._content.trim()
        self._reasoning.trim()

    def begin(self, name: str, call_id: str = "") -> None:
        """A call of `name` begins.

        Args:
            call_id: that the model has given it; "" = none.
        """
        self._is_open = True
        self._begun = CallBegin(name, call_id)
        if not self.buffers_tool_calls:
            self._tell_begin()

    def arguments(self, text: str) -> None:
        """More of the call's arguments."""
        if self.buffers_tool_calls:
            self._held.append(text)
        else:
            self._put(CallArguments, text)

    def end(self) -> None:
        """The call is complete; harmless without one."""
        if self._is_open and self.buffers_tool_calls:
            self._tell_begin()
            self._put(CallArguments, "".join(self._held))
            self._held.clear()
        self._is_open = False

    def fail(self, text: str) -> None:
        """The call that is held was none; `text` is how it was written."""
        self._held.clear()
        self._is_open = False
        self.content(text)

    def take(self) -> list[Event]:
        """What is new."""
        self._flush()
        events, self._events = self._events, []
        return events

    def finish(self) -> None:
        """Nothing more comes."""
        self._reasoning.finish()
        self._content.finish()

    def _tell_begin(self) -> None:
        self.trim()
        self._flush()
        self._events.append(self._begun)

    def _put(self, kind: type[Content | Reasoning | CallArguments], text: str) -> None:
        if not text:
            return
        if kind is not self._type:
            self._flush()
            self._type = kind
        self._pieces.append(text)

    def _flush(self) -> None:
        if self._pieces:
            self._events.append(self._type("".join(self._pieces)))
            self._pieces.clear()
