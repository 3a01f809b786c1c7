"""Granite 3: <|tool_call|>[{"name": ..., "arguments": {...}}, ...]; 20b-fc: <function_call> before each object."""

from __future__ import annotations

from collections.abc import Container

from quire.parsers.call_object import JsonCallParser
from quire.parsers.call_syntax import CallSyntax, json_call
from quire.parsers.reader import Markers, Steps

OPEN = Markers("<|tool_call|>", "<tool_call>")
FUNCTION_OPEN = Markers("<function_call>")


class GraniteParser(JsonCallParser):
    """A list of objects after the mark."""

    needs_special_tokens = True

    def parse(self) -> Steps[None]:
        """As `SteppedParser.parse`."""
        while marker := (yield from self.reader.forward(self.out.content, OPEN)):
            self.reader.keep(len(marker))
            yield from self.reader.skip_spaces()
            found = yield from self.call_list()
            yield from self.settle(found)

    @classmethod
    def syntax(cls, special: Container[str] = ()) -> CallSyntax | None:
        """As `ToolCallParser.syntax`."""
        head, middle, tail = json_call()
        mark = next((text for text in OPEN.texts if text in special), OPEN.texts[0])
        return CallSyntax(
            begin=f"{mark}[", head=head, middle=middle, tail=tail, separator=", ", end="]", openers=OPEN.texts
        )


class GraniteFunctionParser(JsonCallParser):
    """An object after each mark."""

    def parse(self) -> Steps[None]:
        """As `SteppedParser.parse`."""
        while marker := (yield from self.reader.forward(self.out.content, FUNCTION_OPEN)):
            self.reader.keep(len(marker))
            yield from self.reader.skip_spaces()
            found = yield from self.call_object()
            yield from self.settle(found, openers=FUNCTION_OPEN)

    @classmethod
    def syntax(cls, special: Container[str] = ()) -> CallSyntax | None:
        """As `ToolCallParser.syntax`."""
        head, middle, tail = json_call()
        return CallSyntax(
            head=f"<function_call> {head}", middle=middle, tail=tail, separator="\n", openers=FUNCTION_OPEN.texts
        )
