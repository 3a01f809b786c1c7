"""Stop texts: where an answer ends, and how much of it may be shown while it could still end.

Called by the detokenizer. Owns the tail of the text in which a match could still begin. The result depends on the
text alone, never on how it was cut into pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class StopMatch(NamedTuple):
    """A stop text that was found: it covers text[start:end]."""

    stop: str
    start: int
    end: int


class StopSearch:
    """Looks for any of `stops` in a text that grows.

    The match that ends first wins; of those that end together, the longest.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._longest = max(map(len, self._stops), default=0)
        self._tail = ""
        self._num_chars = 0
        self._prefixes = {stop[:length] for stop in self._stops for length in range(1, len(stop))}

    def push(self, new_text: str) -> StopMatch | None:
        """Take in more text; a match that ends in it, if there is one. Positions count from the text's beginning."""
        window = self._tail + new_text
        offset = self._num_chars - len(self._tail)
        self._num_chars += len(new_text)
        matches = []
        for stop in self._stops:
            start = window.find(stop, max(0, len(self._tail) - len(stop) + 1))  # it must end in the new text
            if start >= 0:
                matches.append(StopMatch(stop, offset + start, offset + start + len(stop)))
        self._tail = window[-(self._longest - 1) :] if self._longest > 1 else ""
        return min(matches, key=lambda match: (match.end, match.start), default=None)

    def skip(self, new_text: str) -> None:
        """Take in text in which no match may end; one that begins in it may."""
        self._tail = (self._tail + new_text)[-(self._longest - 1) :] if self._longest > 1 else ""
        self._num_chars += len(new_text)

    def num_undecided(self) -> int:
        """Characters at the text's end that could be the beginning of a stop text."""
        for length in range(len(self._tail), 0, -1):
            if self._tail[-length:] in self._prefixes:
                return length
        return 0
