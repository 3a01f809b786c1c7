"""ReasoningFormat: a reasoning parser with a tokenizer; from a prompt to what delimits the answer's reasoning.

Made by the input processor, and by a server for its chats. No state but what it is made of.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from quire.core.reasoning import ReasoningDelimiters
from quire.parsers.base import ReasoningParser
from quire.parsers.reader import SPACES
from quire.tokenization.tokenizer import Tokenizer

TAIL_TOKENS = 16
"""Tokens at the end of a prompt in which a delimiter may begin or end the reasoning."""


class ReasoningFormat:
    """How a model's reasoning is delimited.

    Args:
        kind: the parser of the format.
        tokenizer: of the model.
    """

    def __init__(self, kind: type[ReasoningParser], tokenizer: Tokenizer) -> None:
        self.kind = kind
        self._tokenizer = tokenizer

    @cached_property
    def start_ids(self) -> tuple[tuple[int, ...], ...]:
        """Token ids of the delimiters that begin it, of those that tokens can write."""
        return tuple(filter(None, map(self._ids_of, () if self.kind.starts is None else self.kind.starts.texts)))

    @cached_property
    def end_ids(self) -> tuple[int, ...]:
        """Token ids of one of the delimiters that end it; () = no budget can end it."""
        return next(filter(None, map(self._ids_of, () if self.kind.ends is None else self.kind.ends.texts)), ())

    def parser(self, prompt_token_ids: Sequence[int], continued: str | None = None) -> ReasoningParser:
        """The parser of an answer to this prompt.

        Args:
            continued: as `ReasoningParser`.
        """
        tail = self._tokenizer.decode(list(prompt_token_ids[-TAIL_TOKENS:]), skip_special_tokens=False)
        return self.kind(tail, continued)

    def delimiters(self, prompt_token_ids: Sequence[int], continued: str | None = None) -> ReasoningDelimiters | None:
        """For grammars and budgets, which wait for its end; None when the parser declares none."""
        parser = self.parser(prompt_token_ids, continued)
        parser.waits_for_end = True
        found = delimiters_of(parser)
        if found is None:
            return None
        return ReasoningDelimiters(
            starts=found.starts, ends=found.ends, is_open=found.is_open,
            start_ids=self.start_ids, end_ids=self.end_ids,
        )  # fmt: skip

    def _ids_of(self, text: str) -> tuple[int, ...]:
        """Tokens that write `text` and at most white space before it; none when the vocabulary cannot."""
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        table = self._tokenizer.table
        written = b"" if table is None else b"".join(map(table.piece, ids))
        return tuple(ids) if written.decode("utf-8", "replace").lstrip(SPACES) == text else ()


def delimiters_of(parser: ReasoningParser) -> ReasoningDelimiters | None:
    """Those that a parser, which has read nothing yet, looks for; None when it declares none."""
    if parser.starts is None or parser.ends is None:
        return None
    return ReasoningDelimiters(
        starts=parser.starts.texts,
        ends=parser.ends.texts,
        is_open=parser.is_inside,
        calls=() if parser.waits_for_end else parser.call_marks,
        call_heads=() if parser.waits_for_end else parser.call_heads,
    )
