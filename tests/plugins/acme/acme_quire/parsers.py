"""Parsers of answers, whole or streamed."""

from __future__ import annotations

from quire.parsers.base import ReasoningParser, ToolCallParser
from quire.parsers.reader import Steps


class AcmeCalls(ToolCallParser):
    """No calls: everything is content, aloud."""

    quire_contract = 1

    def parse(self) -> Steps[None]:
        yield from self.reader.forward_rest(lambda text: self.out.content(text.upper()))


class AcmeReasoning(ReasoningParser):
    """The whole answer is reasoning."""

    quire_contract = 1

    def parse(self) -> Steps[None]:
        yield from self.reader.forward_rest(self.out.reasoning)
