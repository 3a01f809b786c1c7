"""Llama 3 and 4 in JSON: {"name": ..., "parameters": {...}}, perhaps after <|python_tag|>, several apart by ";"."""

from __future__ import annotations

from collections.abc import Container

from quire.parsers.call_object import Found, JsonCallParser
from quire.parsers.call_syntax import CallSyntax, json_call
from quire.parsers.reader import Markers, Steps

TAG = "<|python_tag|>"
OBJECTS = ('{"name"', '{ "name"', '{\n"name"', '{\n  "name"', '{\n    "name"', '{"type": "function"')
OPEN = Markers(TAG, *OBJECTS)


class Llama3JsonParser(JsonCallParser):
    """Objects at the beginning of the answer, after a tag or a call; elsewhere those that begin as calls do."""

    def parse(self) -> Steps[None]:
        """As `SteppedParser.parse`."""
        reader, out = self.reader, self.out
        reader.keep()
        yield from reader.skip_spaces()
        yield from reader.skip(TAG)
        while True:
            found = Found.CALL
            while found is Found.CALL:
                yield from reader.skip_spaces()
                found = yield from self.call_object(needs_arguments=True)
                yield from self.settle(found)
                if found is Found.CALL:
                    reader.keep()
                    yield from reader.skip_spaces()
                    if (yield from reader.skip(";", ",")):
                        yield from reader.skip_spaces()
                    yield from reader.skip(TAG)
            marker = yield from reader.forward(out.content, OPEN)
            if not marker:
                return
            if marker in OBJECTS:
                reader.pos -= len(marker)
            reader.keep(0 if marker in OBJECTS else len(marker))

    @classmethod
    def syntax(cls, special: Container[str] = ()) -> CallSyntax | None:
        """As `ToolCallParser.syntax`."""
        head, middle, tail = json_call("parameters")
        return CallSyntax(head=head, middle=middle, tail=tail, separator="; ", starts_answer=True, openers=OPEN.texts)
