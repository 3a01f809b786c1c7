"""Fixed texts of a format as parts of a grammar, in which control tokens are tokens. Values only."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from quire.core.call_grammar import CallGrammar, Literal, Token


class Literals:
    """Fixed texts, in which control tokens are tokens.

    Args:
        special: text -> id.
    """

    def __init__(self, special: Mapping[str, int]) -> None:
        self._special = special
        longest_first = sorted(filter(None, special), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def excluded(self, texts: Sequence[str]) -> tuple[str, ...]:
        """What free text must not hold so that it holds none of `texts`, in whatever tokens."""
        named = [found[0] for text in texts for found in self._pattern.finditer(text)]
        return tuple(dict.fromkeys((*texts, *named)))

    def of(self, text: str) -> list[CallGrammar]:
        """The parts of `text`."""
        parts: list[CallGrammar] = []
        start = 0
        for found in self._pattern.finditer(text):
            parts += literal(text[start : found.start()])
            parts.append(Token(self._special[found[0]]))
            start = found.end()
        return parts + literal(text[start:])


def literal(text: str) -> list[CallGrammar]:
    """A text as it is; nothing when it is empty."""
    return [Literal(text)] if text else []
