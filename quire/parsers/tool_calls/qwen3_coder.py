"""Qwen3-Coder: <tool_call><function=name><parameter=key>value</parameter></function></tool_call>, nothing quoted."""

from __future__ import annotations

import re
from collections.abc import Container

from quire.parsers.base import ToolCallParser
from quire.parsers.call_object import MAX_NAME_CHARS
from quire.parsers.call_syntax import CallSyntax
from quire.parsers.reader import Markers, Steps
from quire.parsers.tools import encode, json_of

TOOL_CALL, FUNCTION, PARAMETER = "<tool_call>", "<function=", "<parameter="
OPEN = Markers(TOOL_CALL, FUNCTION)
VALUE_END = Markers("\n</parameter>", "</parameter>")
NAME_RUN = re.compile(r"[^<>\n]*")
STRING = frozenset(("string",))


class Qwen3CoderParser(ToolCallParser):
    """Values become JSON of the types that the tool's schema names; a text is told as it comes.

    A value ends at the first </parameter>, as the format has no way to write that as text. A call is begun when its
    function, which must be a tool, has come. What breaks the call after that leaves its arguments open.
    """

    marks = (TOOL_CALL, "</tool_call>")

    def parse(self) -> Steps[None]:
        """As `SteppedParser.parse`."""
        reader, out = self.reader, self.out
        while marker := (yield from reader.forward(out.content, OPEN)):
            reader.keep(len(marker))
            is_wrapped = marker == TOOL_CALL
            if is_wrapped:
                yield from reader.skip_spaces()
                if not (yield from reader.skip(FUNCTION)):
                    out.content(reader.kept())
                    continue
            name = yield from self._name()
            if not self.tools.allows(name):
                out.content(reader.kept())
                continue
            out.begin(name)
            is_whole = yield from self._parameters(name)
            rest = reader.kept()
            if not is_whole and out.holds_calls:
                out.fail(rest)
                continue
            out.end()
            if not is_whole:
                out.content(rest)
                continue
            yield from reader.skip_spaces()
            if is_wrapped:
                yield from reader.skip("</tool_call>")

    def _name(self) -> Steps[str]:
        """A name up to its bracket, in quotes or not; "" when there is none."""
        name = yield from self.reader.run(NAME_RUN, MAX_NAME_CHARS)
        closed = yield from self.reader.skip(">")
        return name.strip().strip("\"'") if closed else ""

    def _parameters(self, function: str) -> Steps[bool]:
        """Everything up to the end of the function; False when it is broken."""
        reader, out = self.reader, self.out
        seen: set[str] = set()
        out.arguments("{")
        while True:
            if not out.holds_calls:
                reader.keep()
            yield from reader.skip_spaces()
            found = yield from reader.skip(PARAMETER, "</function>")
            if found == "</function>":
                out.arguments("}")
                return True
            key = (yield from self._name()) if found else ""
            if not key or key in seen:
                return False
            out.arguments(f"{', ' if seen else ''}{encode(key)}: ")
            seen.add(key)
            if not out.holds_calls:
                reader.drop()
            if not (yield from self._value(function, key)):
                return False

    def _value(self, function: str, key: str) -> Steps[bool]:
        reader, out = self.reader, self.out
        yield from reader.skip("\n")
        types = self.tools.types_of(function, key)
        if types is None or types == STRING:
            out.arguments('"')
            found = yield from reader.forward(lambda text: out.arguments(encode(text)[1:-1]), VALUE_END)
            if found:
                out.arguments('"')
        else:
            parts: list[str] = []
            found = yield from reader.forward(parts.append, VALUE_END)
            text = "".join(parts)
            out.arguments(json_of(text, types) if found else text)
        return bool(found)

    @classmethod
    def syntax(cls, special: Container[str] = ()) -> CallSyntax | None:
        """As `ToolCallParser.syntax`."""
        return CallSyntax(
            head=f"{TOOL_CALL}\n{FUNCTION}", middle=">\n", tail="</function>\n</tool_call>", separator="\n",
            openers=OPEN.texts, has_parameters=True,
        )  # fmt: skip
