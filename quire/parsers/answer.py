"""One answer through both parsers, and its tokens of reasoning counted. Made for each answer by the server."""

from __future__ import annotations

from collections.abc import Sequence

from quire.core.reasoning import ReasoningTracker
from quire.parsers.base import AnswerParser, ReasoningParser, ToolCallParser
from quire.parsers.events import Content, Event
from quire.parsers.reasoning_format import delimiters_of
from quire.tokenization.incremental import IncrementalDetokenizer
from quire.tokenization.tokenizer import Tokenizer


class ParserChain(AnswerParser):
    """Calls are looked for in what is not reasoning.

    Args:
        reasoning: separates the reasoning.
        tool_calls: gets the rest.
    """

    def __init__(self, reasoning: ReasoningParser, tool_calls: ToolCallParser) -> None:
        self._reasoning = reasoning
        self._tool_calls = tool_calls

    def push(self, text: str) -> list[Event]:
        """As `AnswerParser.push`."""
        return self._passed_on(self._reasoning.push(text))

    def finish(self) -> list[Event]:
        """As `AnswerParser.finish`."""
        return self._passed_on(self._reasoning.finish()) + self._tool_calls.finish()

    def _passed_on(self, events: list[Event]) -> list[Event]:
        passed: list[Event] = []
        for event in events:
            passed += self._tool_calls.push(event.text) if isinstance(event, Content) else [event]
        return passed


class ReasoningCount:
    """Tokens of the reasoning, its delimiters left out.

    Args:
        parser: of the answer's reasoning, which has read nothing yet; one that declares no delimiters is fed here,
            token by token.
        tokenizer: makes text of tokens.
        prompt_token_ids: what the answer follows.
        skip_special_tokens: as the answer's text is made.
    """

    def __init__(
        self,
        parser: AnswerParser,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
    ) -> None:
        delimiters = delimiters_of(parser) if isinstance(parser, ReasoningParser) else None
        self._tracker = _ParserTracker(parser) if delimiters is None else ReasoningTracker(delimiters)
        self._text = IncrementalDetokenizer.create(tokenizer, prompt_token_ids, skip_special_tokens=skip_special_tokens)

    @property
    def num_tokens(self) -> int:
        """Tokens so far."""
        return self._tracker.num_tokens

    def push(self, token_ids: Sequence[int]) -> None:
        """More tokens of the answer."""
        for token_id in token_ids:
            self._tracker.push(self._text.push((token_id,)).encode())


class _ParserTracker:
    """A format without delimiters, followed by its parser as `ReasoningTracker` follows the others."""

    def __init__(self, parser: AnswerParser) -> None:
        self._parser = parser
        self._num_inside = 0

    @property
    def num_tokens(self) -> int:
        return self._num_inside - self._parser.has_redundant_start_tag

    def push(self, piece: bytes) -> None:
        was_inside = self._parser.is_inside
        self._parser.push(piece.decode())
        self._num_inside += was_inside and self._parser.is_inside
