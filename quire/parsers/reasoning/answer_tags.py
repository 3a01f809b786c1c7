"""Thinking and answer each between two marks: ERNIE 4.5 (<response>) and Hunyuan A13B (<answer>)."""

from __future__ import annotations

from typing import ClassVar

from quire.parsers.reader import Markers, Steps
from quire.parsers.reasoning.tags import TagParser


class AnswerTagParser(TagParser):
    """Subclassed with the marks of a format; those of the answer are left out of it, and either may be missing.

    Attributes:
        answer_start, answer_end: stand around the answer.
    """

    answer_start: ClassVar[str]
    answer_end: ClassVar[str]

    def rest(self) -> Steps[None]:
        """As `TagParser.rest`."""
        reader, out = self.reader, self.out
        reader.keep()
        yield from reader.skip_spaces()
        if (yield from reader.skip(self.answer_start)):
            reader.drop()
            out.trim()
            yield from reader.forward(out.content, Markers(self.answer_end))
            out.trim()
        else:
            out.content(reader.kept())
        yield from reader.forward_rest(out.content)


class Ernie45ReasoningParser(AnswerTagParser):
    """ERNIE 4.5 Thinking: the template begins the reasoning."""

    begins_inside = True
    answer_start, answer_end = "<response>", "</response>"


class HunyuanReasoningParser(AnswerTagParser):
    """Hunyuan A13B: <think> and </think>, then <answer> and </answer>."""

    answer_start, answer_end = "<answer>", "</answer>"
