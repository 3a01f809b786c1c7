"""xLAM: [{"name": ..., "arguments": {...}}, ...], alone, in a fence of code, or after a tag of another family."""

from __future__ import annotations

from collections.abc import Container

from quire.parsers.call_object import Found, JsonCallParser
from quire.parsers.call_syntax import CallSyntax, json_call
from quire.parsers.reader import Markers, Steps

FENCE = "```"
CLOSERS = {FENCE: FENCE, "<tool_call>": "</tool_call>"}
LISTS = ('[{"name"', '[ {"name"', '[\n  {"name"', '[\n{"name"', '[\n  {\n    "name"')
OPEN = Markers(*CLOSERS, "[TOOL_CALLS]", *LISTS)


class XlamParser(JsonCallParser):
    """A list, or one object, at the beginning of the answer or after a mark; elsewhere lists that begin as calls do."""

    def parse(self) -> Steps[None]:
        """As `SteppedParser.parse`."""
        reader, out = self.reader, self.out
        reader.keep()
        yield from reader.skip_spaces()
        marker = yield from reader.skip(*CLOSERS, "[TOOL_CALLS]")
        while True:
            yield from self._calls(marker)
            marker = yield from reader.forward(out.content, OPEN)
            if not marker:
                return
            if marker in LISTS:
                reader.pos -= len(marker)
            reader.keep(0 if marker in LISTS else len(marker))

    def _calls(self, marker: str) -> Steps[None]:
        """What follows a mark."""
        reader = self.reader
        if marker == FENCE:
            yield from reader.skip("json")
        yield from reader.skip_spaces()
        is_list = (yield from reader.peek()) == "["
        found = yield from (self.call_list() if is_list else self.call_object(needs_arguments=True))
        yield from self.settle(found)
        if found is Found.CALL and marker in CLOSERS:
            yield from reader.skip_spaces()
            yield from reader.skip(CLOSERS[marker])

    @classmethod
    def syntax(cls, special: Container[str] = ()) -> CallSyntax | None:
        """As `ToolCallParser.syntax`; a call among text begins in too many ways for a grammar."""
        head, middle, tail = json_call()
        return CallSyntax(begin="[", head=head, middle=middle, tail=tail, separator=", ", end="]", starts_answer=True)
