"""Gemma 4: <|tool_call>call:name{key:<|"|>text<|"|>,other:5}<tool_call|>; FunctionGemma: the same in other marks."""

from __future__ import annotations

import re
from typing import ClassVar

from quire.parsers.bare_keys import BareKeys
from quire.parsers.call_object import MAX_NAME_CHARS, Found, JsonCallParser
from quire.parsers.reader import Markers, Steps

NAME_RUN = re.compile(r"[\w.:/-]*")


class Gemma4Parser(JsonCallParser):
    """Keys are bare and texts stand between marks, so no grammar of JSON can say it.

    Attributes:
        opener, closer: of a call.
        quote: before and after a text.
    """

    needs_special_tokens = True
    opener: ClassVar[Markers] = Markers("<|tool_call>")
    closer: ClassVar[Markers] = Markers("<tool_call|>")
    quote: ClassVar[str] = '<|"|>'

    def parse(self) -> Steps[None]:
        """As `SteppedParser.parse`."""
        while marker := (yield from self.reader.forward(self.out.content, self.opener)):
            self.reader.keep(len(marker))
            found = yield from self._call()
            yield from self.settle(found, self.closer)

    def _call(self) -> Steps[Found]:
        reader = self.reader
        yield from reader.skip_spaces()
        if not (yield from reader.skip("call:")):
            return Found.NO_CALL
        name = yield from reader.run(NAME_RUN, MAX_NAME_CHARS)
        yield from reader.skip_spaces()
        if not self.tools.allows(name) or not (yield from reader.skip("{")):
            return Found.NO_CALL
        self.out.begin(name)
        is_whole = yield from BareKeys(reader, self.out.arguments, self.quote).read()
        return Found.CALL if is_whole else Found.BROKEN


class FunctionGemmaParser(Gemma4Parser):
    """FunctionGemma, of Gemma 3."""

    opener, closer = Markers("<start_function_call>"), Markers("<end_function_call>")
    quote = "<escape>"
