"""Reader: the text of one answer as it arrives, read by a generator that stops where it needs more.

A parser is written as if it had the whole text: each method that looks at text is a generator which yields while what
there is does not decide. So how the text is cut cannot matter. Owned by a parser; owns the text that is not read yet,
and what is kept of the text read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from typing import TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]
Sink = Callable[[str], None]

SPACES = " \t\r\n"
SPACE_RUN = re.compile(r"[ \t\r\n]*")
MAX_SPACES = 1024


class Markers:
    """Texts that end a stretch of text; none of them begins with another."""

    def __init__(self, *texts: str) -> None:
        self.texts = texts
        self._pattern = re.compile("|".join(re.escape(text) for text in texts))
        self._longest = max(map(len, texts))
        self._beginnings = {text[:size] for text in texts for size in range(1, len(text))}

    def find(self, text: str, pos: int) -> re.Match[str] | None:
        """The first marker in `text` from `pos` on."""
        return self._pattern.search(text, pos)

    def num_undecided(self, text: str, pos: int) -> int:
        """Characters at the end of `text`, from `pos` on, that may be the beginning of a marker."""
        for size in range(min(self._longest - 1, len(text) - pos), 0, -1):
            if text[-size:] in self._beginnings:
                return size
        return 0


class Reader:
    """Text with a position.

    Attributes:
        text: what has arrived and was not read before the last `add`.
        pos: of the next character in it.
        is_over: nothing more arrives.
    """

    __slots__ = ("_kept", "_kept_from", "is_over", "pos", "text")

    def __init__(self) -> None:
        self.text = ""
        self.pos = 0
        self.is_over = False
        self._kept: list[str] = []
        self._kept_from: int | None = None

    def add(self, text: str) -> None:
        """More text has arrived."""
        if self._kept_from is not None:
            self._kept.append(self.text[self._kept_from : self.pos])
            self._kept_from = 0
        self.text = self.text[self.pos :] + text
        self.pos = 0

    def keep(self, num_before: int = 0) -> None:
        """Keep what is read from here on, and the last `num_before` characters, for `kept`."""
        self._kept.clear()
        self._kept_from = self.pos - num_before

    def kept(self) -> str:
        """What was read since `keep`; it is kept no longer."""
        if self._kept_from is not None:
            self._kept.append(self.text[self._kept_from : self.pos])
        text = "".join(self._kept)
        self.drop()
        return text

    def drop(self) -> None:
        """Keep nothing any longer."""
        self._kept.clear()
        self._kept_from = None

    def peek(self) -> Steps[str]:
        """The next character; "" at the end."""
        while self.pos == len(self.text):
            if self.is_over:
                return ""
            yield
        return self.text[self.pos]

    def skip(self, *literals: str) -> Steps[str]:
        """Read the longest of `literals` that the text goes on with; "" when it is none."""
        longest = max(map(len, literals))
        while True:
            ahead = self.text[self.pos : self.pos + longest]
            is_undecided = any(len(one) > len(ahead) and one.startswith(ahead) for one in literals)
            if not is_undecided or self.is_over:
                break
            yield
        found = max((one for one in literals if ahead.startswith(one)), key=len, default="")
        self.pos += len(found)
        return found

    def skip_spaces(self) -> Steps[None]:
        """Read white space, of a run without end only the beginning."""
        yield from self.run(SPACE_RUN, MAX_SPACES)

    def run(self, pattern: re.Pattern[str], limit: int) -> Steps[str]:
        """Read at most `limit` characters that fit `pattern`, which is one class of characters, repeated."""
        parts: list[str] = []
        while True:
            match = pattern.match(self.text, self.pos, self.pos + limit)
            assert match is not None, "a repeated class fits the empty text"
            parts.append(match[0])
            limit -= len(match[0])
            self.pos = match.end()
            if limit == 0 or self.pos < len(self.text) or self.is_over:
                return "".join(parts)
            yield

    def forward(self, sink: Sink, markers: Markers) -> Steps[str]:
        """Read up to and including the next marker, returned ("" at the end); the text before it goes to `sink`."""
        while True:
            found = markers.find(self.text, self.pos)
            if found is not None:
                if found.start() > self.pos:
                    sink(self.text[self.pos : found.start()])
                self.pos = found.end()
                return found[0]
            end = len(self.text)
            if not self.is_over:
                end -= markers.num_undecided(self.text, self.pos)
            if end > self.pos:
                sink(self.text[self.pos : end])
                self.pos = end
            if self.is_over:
                return ""
            yield

    def forward_rest(self, sink: Sink) -> Steps[None]:
        """Read all that follows into `sink`."""
        while True:
            if self.pos < len(self.text):
                sink(self.text[self.pos :])
                self.pos = len(self.text)
            if self.is_over:
                return
            yield
