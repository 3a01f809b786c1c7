"""Mistral: [TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...], or [TOOL_CALLS]name[ARGS]{...} for each call."""

from __future__ import annotations

import re
from collections.abc import Container

from quire.parsers.call_object import MAX_NAME_CHARS, Found, JsonCallParser
from quire.parsers.call_syntax import CallSyntax, json_call
from quire.parsers.reader import Markers, Steps

OPEN = Markers("[TOOL_CALLS]")
NAME_RUN = re.compile(r"[\w.:/-]*")
ID_RUN = re.compile(r"[0-9A-Za-z]*")


class MistralParser(JsonCallParser):
    """Both forms, distinguished by what follows the delimiter; a call's id has nine letters and digits."""

    needs_special_tokens = True
    id_chars = 9

    def parse(self) -> Steps[None]:
        """As `SteppedParser.parse`."""
        while marker := (yield from self.reader.forward(self.out.content, OPEN)):
            self.reader.keep(len(marker))
            yield from self.reader.skip_spaces()
            is_list = (yield from self.reader.peek()) == "["
            found = yield from (self.call_list() if is_list else self._named_call())
            yield from self.settle(found, openers=None if is_list else OPEN)

    def _named_call(self) -> Steps[Found]:
        """name[CALL_ID]id[ARGS]{...}, where both marks may be missing."""
        name = yield from self.reader.run(NAME_RUN, MAX_NAME_CHARS)
        if not self.tools.allows(name):
            return Found.NO_CALL
        if (yield from self.reader.skip("[CALL_ID]")):
            yield from self.reader.run(ID_RUN, MAX_NAME_CHARS)
        yield from self.reader.skip("[ARGS]")
        yield from self.reader.skip_spaces()
        return (yield from self.call_arguments(name))

    @classmethod
    def syntax(cls, special: Container[str] = ()) -> CallSyntax | None:
        """As `ToolCallParser.syntax`."""
        if "[ARGS]" in special:
            return CallSyntax(head="[TOOL_CALLS]", middle="[ARGS]", tail="", openers=OPEN.texts)
        head, middle, tail = json_call()
        return CallSyntax(
            begin="[TOOL_CALLS] [", head=head, middle=middle, tail=tail, separator=", ", end="]", openers=OPEN.texts
        )
