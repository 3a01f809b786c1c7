"""Fixed texts of a format as parts of a grammar, in which control tokens are tokens. Values only."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

Form = dict[str, Any]


class Literals:
    """Fixed texts, in which control tokens are tokens.

    Args:
        special: text -> id.
    """

    def __init__(self, special: Mapping[str, int]) -> None:
        self._special = special
        longest_first = sorted(filter(None, special), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def excluded(self, texts: Sequence[str]) -> list[str]:
        """What free text must not hold so that it holds none of `texts`, in whatever tokens."""
        named = [found[0] for text in texts for found in self._pattern.finditer(text)]
        return list(dict.fromkeys((*texts, *named)))

    def of(self, text: str) -> list[Form]:
        """The parts of `text`."""
        parts: list[Form] = []
        start = 0
        for found in self._pattern.finditer(text):
            parts += constant(text[start : found.start()])
            parts.append({"type": "token", "token": self._special[found[0]]})
            start = found.end()
        return parts + constant(text[start:])


def constant(text: str) -> list[Form]:
    """A text as it is; nothing when it is empty."""
    return [{"type": "const_string", "value": text}] if text else []
