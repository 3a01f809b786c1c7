"""Thinking between two marks at the beginning of an answer; the mark that begins it may stand in the prompt."""

from __future__ import annotations

from typing import ClassVar

from quire.parsers.base import ReasoningParser
from quire.parsers.reader import Markers, Steps


class TagParser(ReasoningParser):
    """Subclassed with the marks of a format; as it is, <think> and </think>.

    Attributes:
        starts: what may begin the reasoning.
        ends: what ends it.
        begins_inside: an answer without the first mark is reasoning, too, unless the prompt has ended it.
    """

    starts: ClassVar[Markers] = Markers("<think>")
    ends: ClassVar[Markers] = Markers("</think>")
    begins_inside: ClassVar[bool] = False
    marks: ClassVar[tuple[str, ...]] = (*starts.texts, *ends.texts)

    def __init__(self, prompt_tail: str = "", continued: str | None = None) -> None:
        super().__init__(prompt_tail, continued)
        starts, ends = self.starts.texts, self.ends.texts
        if continued is not None:
            self.is_inside = max(map(continued.rfind, starts)) > max(map(continued.rfind, ends))
        else:
            is_closed = self.prompt_tail.endswith(ends)
            self.is_inside = self.prompt_tail.endswith(starts) or (self.begins_inside and not is_closed)

    def parse(self) -> Steps[None]:
        """As `SteppedParser.parse`."""
        reader, out = self.reader, self.out
        reader.keep()
        yield from reader.skip_spaces()
        marker = yield from reader.skip(*self.starts.texts)
        if marker or self.is_inside:
            self.has_redundant_start_tag = bool(marker) and self.is_inside
            self.is_inside = True
            reader.drop()
            out.trim()
            call_mark = yield from self._thinking()
            out.trim()
            out.content(call_mark)
        else:
            out.content(reader.kept())
        yield from self.rest()

    def rest(self) -> Steps[None]:
        """Read what follows the reasoning, or is an answer without any."""
        yield from self.reader.forward_rest(self.out.content)

    def _thinking(self) -> Steps[str]:
        """Read the reasoning and its end; the mark of the call that ended it, "" when none did."""
        marks = self.ends if self.waits_for_end else Markers(*self.ends.texts, *self.call_marks)
        while (marker := (yield from self.reader.forward(self.out.reasoning, marks))) in self.call_marks:
            self.is_inside = False
            head = (yield from self.reader.skip(*self.call_heads)) if self.call_heads else ""
            self.reader.pos -= len(head)
            if head or not self.call_heads or not (yield from self.reader.peek()):
                return marker
            self.is_inside = True
            self.out.reasoning(marker)
        self.is_inside = False
        return ""
