"""DeepSeek V3 and R1 (function<|sep|>name, arguments in a fence of three backticks) and V3.1 (name<|sep|>arguments)."""

from __future__ import annotations

import re
from collections.abc import Container

from quire.parsers.call_object import MAX_NAME_CHARS, Found
from quire.parsers.call_syntax import CallSyntax
from quire.parsers.reader import Steps
from quire.parsers.tool_calls.section import SectionParser

CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"
NAME_RUN = re.compile(r"[\w.:/-]*")
FENCE = "```"


class DeepSeekV3Parser(SectionParser):
    """Calls between the marks of one block."""

    section = CALLS_BEGIN, CALLS_END
    call = CALL_BEGIN, CALL_END
    has_kind = True

    def parse_call(self) -> Steps[Found]:
        """As `SectionParser.parse_call`."""
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
            openers=(CALLS_BEGIN, CALL_BEGIN),
        )  # fmt: skip


class DeepSeekV31Parser(DeepSeekV3Parser):
    """The name first, the arguments without a fence."""

    has_kind = False

    @classmethod
    def syntax(cls, special: Container[str] = ()) -> CallSyntax | None:
        """As `ToolCallParser.syntax`."""
        return CallSyntax(
            begin=CALLS_BEGIN,
            head=CALL_BEGIN,
            middle=SEPARATOR,
            tail=CALL_END,
            end=CALLS_END,
            openers=(CALLS_BEGIN, CALL_BEGIN),
        )
