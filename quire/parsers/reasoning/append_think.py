"""MiniMax M2 with its reasoning as a part of the answer, as clients send it back: <think> in front, nothing apart."""

from __future__ import annotations

from quire.parsers.base import ReasoningParser
from quire.parsers.reader import Steps

START = "<think>"


class AppendThinkParser(ReasoningParser):
    """All text is content, after the mark that the prompt ended with."""

    def parse(self) -> Steps[None]:
        """As `SteppedParser.parse`."""
        yield from self.reader.peek()
        if self.continued is None:
            self.out.content(START)
        yield from self.reader.forward_rest(self.out.content)
