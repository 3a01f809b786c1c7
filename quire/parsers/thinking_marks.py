"""From a reasoning parser to the marks by which an engine core knows an answer's thinking. Pure functions."""

from __future__ import annotations

from quire.core.thinking import ThinkingMarks
from quire.parsers.base import ReasoningParser
from quire.parsers.reader import SPACES
from quire.tokenization.tokenizer import Tokenizer

TAIL_TOKENS = 16
"""Tokens at the end of a prompt in which a mark may begin or end the thinking."""


def thinking_marks(parser: ReasoningParser, tokenizer: Tokenizer) -> ThinkingMarks | None:
    """The marks that `parser`, which has read nothing yet, looks for; None when it does not tell them."""
    if parser.starts is None or parser.ends is None:
        return None
    starts = (_ids_of(text, tokenizer) for text in parser.starts.texts)
    ends = (_ids_of(text, tokenizer) for text in parser.ends.texts)
    return ThinkingMarks(
        starts=parser.starts.texts,
        ends=parser.ends.texts,
        is_open=parser.is_inside,
        start_ids=tuple(filter(None, starts)),
        end_ids=next(filter(None, ends), ()),
    )


def _ids_of(mark: str, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Tokens that write `mark` and at most white space before it; none when the vocabulary cannot."""
    ids = tokenizer.encode(mark, add_special_tokens=False)
    table = tokenizer.table
    written = b"" if table is None else b"".join(map(table.piece, ids))
    return tuple(ids) if written.decode("utf-8", "replace").lstrip(SPACES) == mark else ()
