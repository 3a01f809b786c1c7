"""Kimi K2: <|tool_call_begin|>functions.name:index<|tool_call_argument_begin|>{...}<|tool_call_end|>, in a section."""

from __future__ import annotations

import re
from collections.abc import Container

from quire.parsers.call_object import MAX_NAME_CHARS, Found
from quire.parsers.call_syntax import CallSyntax
from quire.parsers.reader import Steps
from quire.parsers.tool_calls.section import SectionParser

SECTION_BEGIN, SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL_BEGIN, CALL_END, ARGUMENTS = "<|tool_call_begin|>", "<|tool_call_end|>", "<|tool_call_argument_begin|>"
ID_RUN = re.compile(r"[\w.:/-]*")
INDEX = re.compile(r":\d+$")
PREFIX = "functions."


class KimiK2Parser(SectionParser):
    """The name is a part of the call's id, which the model counts on to find again in its prompt."""

    section = SECTION_BEGIN, SECTION_END
    call = CALL_BEGIN, CALL_END

    def parse_call(self) -> Steps[Found]:
        """As `SectionParser.parse_call`."""
        reader = self.reader
        yield from reader.skip_spaces()
        call_id = yield from reader.run(ID_RUN, MAX_NAME_CHARS)
        yield from reader.skip_spaces()
        name = INDEX.sub("", call_id).removeprefix(PREFIX)
        if not self.tools.allows(name) or not (yield from reader.skip(ARGUMENTS)):
            return Found.NO_CALL
        yield from reader.skip_spaces()
        return (yield from self.call_arguments(name, call_id if INDEX.search(call_id) else ""))

    @classmethod
    def syntax(cls, special: Container[str] = ()) -> CallSyntax | None:
        """As `ToolCallParser.syntax`."""
        return CallSyntax(
            begin=SECTION_BEGIN, head=CALL_BEGIN + PREFIX, middle=f":0{ARGUMENTS}", tail=CALL_END, end=SECTION_END,
            openers=(SECTION_BEGIN, CALL_BEGIN),
        )  # fmt: skip
