"""What every parser is: text in as it comes, events out. Subclassed in `tool_calls` and `reasoning`, and by plugins."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Container
from typing import ClassVar

from quire.parsers.call_syntax import CallSyntax
from quire.parsers.events import Event
from quire.parsers.output import Output
from quire.parsers.reader import Markers, Reader, Steps
from quire.parsers.tools import Tools


class AnswerParser(ABC):
    """A parser of one answer; a whole answer is a stream of one part.

    Attributes:
        needs_special_tokens: the format is written with control tokens, which must be part of the text.
        marks: what it looks for; where a vocabulary has one as a control token, that must be part of the text, too.
        is_inside: what comes next is reasoning.
        has_redundant_start_tag: a mark that begins the reasoning came although it had begun before.
    """

    needs_special_tokens: ClassVar[bool] = False
    marks: ClassVar[tuple[str, ...]] = ()
    is_inside = False
    has_redundant_start_tag = False

    @abstractmethod
    def push(self, text: str) -> list[Event]:
        """Take in the next part of the answer; what is decided by now."""

    @abstractmethod
    def finish(self) -> list[Event]:
        """The answer has ended: the rest."""


class SteppedParser(AnswerParser):
    """A parser written as one generator over a `Reader`, which depends on the text and not on how it was cut.

    Args:
        buffers_tool_calls: emit a call only when it is complete.
    """

    def __init__(self, *, buffers_tool_calls: bool = False) -> None:
        self.reader = Reader()
        self.out = Output(buffers_tool_calls=buffers_tool_calls)
        self._steps = self.parse()
        self._is_done = False

    @abstractmethod
    def parse(self) -> Steps[None]:
        """Read `self.reader` to its end and write events to `self.out`."""

    def push(self, text: str) -> list[Event]:
        """As `AnswerParser.push`."""
        self.reader.add(text)
        self._step()
        return self.out.take()

    def finish(self) -> list[Event]:
        """As `AnswerParser.finish`."""
        self.reader.is_over = True
        self._step()
        assert self._is_done, "a parser reads to the end"
        self.out.finish()
        return self.out.take()

    def _step(self) -> None:
        if not self._is_done:
            self._is_done = next(self._steps, self) is self


class ToolCallParser(SteppedParser):
    """Finds calls of `tools`; what is no such call is content.

    Args:
        tools: that may be called.
        buffers_tool_calls: send a call when it is complete, so that a broken one is content; else its
            arguments are sent as they come.

    Attributes:
        id_chars: length of a call's id, letters and digits alone; 0 = the API's own form.
        has_reasoning: it separates the reasoning, too, and takes the place of a reasoning parser.
    """

    id_chars: ClassVar[int] = 0
    has_reasoning: ClassVar[bool] = False

    def __init__(self, tools: Tools, *, buffers_tool_calls: bool = False) -> None:
        self.tools = tools
        super().__init__(buffers_tool_calls=buffers_tool_calls)

    @classmethod
    def syntax(cls, special: Container[str] = ()) -> CallSyntax | None:
        """How calls are written, where a grammar can say it; calls of a format without it cannot be forced.

        Args:
            special: texts of the vocabulary's control tokens, where they tell which form the model writes.
        """
        return None


class ReasoningParser(SteppedParser):
    """Separates the model's reasoning from its answer.

    Args:
        prompt_tail: text of the end of the prompt, which may have begun or ended the reasoning.
        continued: the part of the answer that the prompt holds, if it is to be continued.

    Attributes:
        starts: marks of which one, at the beginning of the answer, begins the reasoning.
        ends: marks of which the first ends it; None = no delimiters, so no grammar waits and no budget ends it.
        call_marks: begin a call and so end the reasoning that lacks its end, unless a grammar waits for that.
        call_heads: one of them follows such a mark, if it is not a mention of it; none = whatever follows.
        waits_for_end: a grammar or a budget counts on `ends`, so nothing else ends the reasoning; set before any text.
    """

    starts: ClassVar[Markers | None] = None
    ends: ClassVar[Markers | None] = None
    call_marks: ClassVar[tuple[str, ...]] = ()
    call_heads: ClassVar[tuple[str, ...]] = ()
    waits_for_end = False

    def __init__(self, prompt_tail: str = "", continued: str | None = None) -> None:
        self.prompt_tail = prompt_tail.rstrip()
        self.continued = continued
        super().__init__()
