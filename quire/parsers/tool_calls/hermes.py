"""Hermes, which Qwen 2.5 and 3 and leaf write, too: <tool_call>{"name": ..., "arguments": {...}}</tool_call>."""

from __future__ import annotations

from collections.abc import Container

from quire.parsers.call_object import JsonCallParser
from quire.parsers.call_syntax import CallSyntax, json_call
from quire.parsers.reader import Markers, Steps

OPEN = Markers("<tool_call>")
CLOSE = Markers("</tool_call>")


class HermesParser(JsonCallParser):
    """One object between each pair of tags."""

    marks = (*OPEN.texts, *CLOSE.texts)

    def parse(self) -> Steps[None]:
        """As `SteppedParser.parse`."""
        while marker := (yield from self.reader.forward(self.out.content, OPEN)):
            self.reader.keep(len(marker))
            yield from self.reader.skip_spaces()
            found = yield from self.call_object()
            yield from self.settle(found, CLOSE)

    @classmethod
    def syntax(cls, special: Container[str] = ()) -> CallSyntax | None:
        """As `ToolCallParser.syntax`."""
        head, middle, tail = json_call()
        return CallSyntax(
            head=f"<tool_call>\n{head}", middle=middle, tail=f"{tail}\n</tool_call>", separator="\n", openers=OPEN.texts
        )
