"""DeepSeek V3 and R1 (function<|sep|>name, arguments in a fence of three backticks) and V3.1 (name<|sep|>arguments)."""

from __future__ import annotations

import re
from collections.abc import Container

from quire.parsers.call_object import MAX_NAME_CHARS, Found, JsonCallParser
from quire.parsers.call_syntax import CallSyntax
from quire.parsers.reader import Markers, Steps

CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"
OPEN = Markers(CALLS_BEGIN, CALL_BEGIN)
CLOSE = Markers(CALL_END)
NAME_RUN = re.compile(r"[\w.:/-]*")
FENCE = "```"


class DeepSeekV3Parser(JsonCallParser):
    """Calls between the marks of one block."""

    needs_special_tokens = True
    has_kind = True

    def parse(self) -> Steps[None]:
        """As `SteppedParser.parse`."""
        reader = self.reader
        while marker := (yield from reader.forward(self.out.content, OPEN)):
            reader.keep(len(marker))
            if marker == CALLS_BEGIN:
                yield from reader.skip_spaces()
                if not (yield from reader.skip(CALL_BEGIN)):
                    self.out.content(reader.kept())
                    continue
            found = yield from self._call()
            yield from self.settle(found, CLOSE)
            if found is not Found.NO_CALL:
                yield from reader.skip_spaces()
                yield from reader.skip(CALLS_END)

    def _call(self) -> Steps[Found]:
        reader = self.reader
        if self.has_kind:
            yield from reader.run(NAME_RUN, MAX_NAME_CHARS)
            if not (yield from reader.skip(SEPARATOR)):
                return Found.NO_CALL
        name = yield from reader.run(NAME_RUN, MAX_NAME_CHARS)
        if not self.tools.allows(name):
            return Found.NO_CALL
        if self.has_kind:
            yield from reader.skip_spaces()
            if (yield from reader.skip(FENCE)):
                yield from reader.skip("json")
        elif not (yield from reader.skip(SEPARATOR)):
            return Found.NO_CALL
        yield from reader.skip_spaces()
        found = yield from self.call_arguments(name)
        if found is Found.CALL:
            yield from reader.skip_spaces()
            yield from reader.skip(FENCE)
        return found

    @classmethod
    def syntax(cls, special: Container[str] = ()) -> CallSyntax | None:
        """As `ToolCallParser.syntax`."""
        return CallSyntax(
            begin=CALLS_BEGIN, head=f"{CALL_BEGIN}function{SEPARATOR}", middle=f"\n{FENCE}json\n",
            tail=f"\n{FENCE}{CALL_END}", separator="\n", end=CALLS_END,
            openers=OPEN.texts,
        )  # fmt: skip


class DeepSeekV31Parser(DeepSeekV3Parser):
    """The name first, the arguments without a fence."""

    has_kind = False

    @classmethod
    def syntax(cls, special: Container[str] = ()) -> CallSyntax | None:
        """As `ToolCallParser.syntax`."""
        return CallSyntax(
            begin=CALLS_BEGIN, head=CALL_BEGIN, middle=SEPARATOR, tail=CALL_END, end=CALLS_END, openers=OPEN.texts
        )
