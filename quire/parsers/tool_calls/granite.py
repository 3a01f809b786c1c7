"""Granite 3: <|tool_call|>[{"name": ..., "arguments": {...}}, ...]; 20b-fc: <function_call> before each object."""

from __future__ import annotations

from quire.parsers.call_object import JsonCallParser
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


class GraniteFunctionParser(JsonCallParser):
    """An object after each mark."""

    def parse(self) -> Steps[None]:
        """As `SteppedParser.parse`."""
        while marker := (yield from self.reader.forward(self.out.content, FUNCTION_OPEN)):
            self.reader.keep(len(marker))
            yield from self.reader.skip_spaces()
            found = yield from self.call_object()
            yield from self.settle(found, openers=FUNCTION_OPEN)
