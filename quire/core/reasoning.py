"""Where an answer stands in its reasoning: what delimits it, and how far its bytes have come.

The delimiters are found by `quire.parsers.reasoning_format`, from the reasoning parser and the end of the prompt. A
`ReasoningTracker` follows them: for grammars that begin after the reasoning and budgets that end it
(`quire.structured_output.reasoning_state`), and for the count of reasoning tokens (`quire.parsers.answer`). It compares
bytes, in whatever tokens they come; the parser of the answer's text reads the same.
"""

from __future__ import annotations

import re
from enum import Enum

import msgspec

SPACES = b" \t\r\n"
MAX_SPACES = 1024
"""White space before the delimiter that begins the reasoning, in bytes, as the parsers have it."""


class ReasoningDelimiters(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What delimits the reasoning in an answer's text.

    Attributes:
        starts: texts of which one, at the beginning of the answer, begins the reasoning.
        ends: texts of which the first that comes ends it.
        is_open: the answer begins inside of the reasoning.
        start_ids: token ids of those of `starts` that tokens can write alone; they are possible where a grammar waits.
        end_ids: token ids of one of `ends`, with which a budget ends the reasoning.
        calls: texts that begin a call of a tool and so end the reasoning, too, if one of `call_heads` follows.
        call_heads: none = whatever follows.
    """

    starts: tuple[str, ...]
    ends: tuple[str, ...]
    is_open: bool
    start_ids: tuple[tuple[int, ...], ...] = ()
    end_ids: tuple[int, ...] = ()
    calls: tuple[str, ...] = ()
    call_heads: tuple[str, ...] = ()


class ReasoningPosition(Enum):
    """Where the next token stands."""

    BEFORE = "before"
    """Reasoning may begin here, or the answer."""
    INSIDE = "inside"
    AFTER = "after"
    """What comes is the answer; it stays so, unless a call turns out to be a mention of one."""


class ReasoningTracker:
    """One answer's.

    Args:
        delimiters: of its reasoning.

    Attributes:
        place: of the next token.
        has_begun: there was reasoning, or there is.
        num_tokens: tokens of reasoning, its delimiters left out.
    """

    def __init__(self, delimiters: ReasoningDelimiters) -> None:
        self._starts = tuple(text.encode() for text in delimiters.starts)
        self._ends = tuple(text.encode() for text in delimiters.ends)
        self._call_heads = tuple(text.encode() for text in delimiters.call_heads)
        marks = (*self._ends, *(text.encode() for text in delimiters.calls))
        self._marks = re.compile(b"|".join(map(re.escape, marks)))
        self._tail_bytes = max(map(len, marks)) - 1
        self._head: bytes | None = b""  # the beginning of the answer, until it is known whether it is a delimiter
        self._tail = b""
        self._call = b""  # one that may be a mention, and what follows it
        self.place = ReasoningPosition.INSIDE if delimiters.is_open else ReasoningPosition.BEFORE
        self.has_begun = delimiters.is_open
        self.num_tokens = 0

    def push(self, piece: bytes) -> None:
        """The bytes of the answer's next token; b"" where they are not part of its text, or not known yet."""
        was_inside = self.place is ReasoningPosition.INSIDE
        if self._call:
            self._read_inside(piece)
        elif self.place is ReasoningPosition.AFTER:
            return
        elif self._head is not None:
            self._read_head(piece)
        else:
            self._read_inside(piece)
        self.num_tokens += was_inside and self.place is ReasoningPosition.INSIDE

    def end(self) -> None:
        """The reasoning was ended from outside."""
        self.place = ReasoningPosition.AFTER

    def num_begun(self) -> dict[bytes, tuple[int, ...]]:
        """End -> how many of its bytes the reasoning may have written last, 0 included."""
        return {end: tuple(n for n in range(len(end)) if self._tail.endswith(end[:n])) for end in self._ends}

    def _read_head(self, piece: bytes) -> None:
        """Until it is known whether the answer begins with a delimiter; inside, one that was there before."""
        assert self._head is not None
        self._head += piece
        text = self._head.lstrip(SPACES)
        has_room = len(self._head) - len(text) <= MAX_SPACES
        start = next((one for one in self._starts if text.startswith(one)), None) if has_room else None
        if start is None and has_room and any(one.startswith(text) for one in self._starts):
            if self.place is ReasoningPosition.INSIDE and self._tail_bytes:
                self._tail = (self._tail + piece)[-self._tail_bytes :]
            return
        head, self._head = self._head, None
        if self.place is ReasoningPosition.INSIDE:
            self._tail = b""
            self.num_tokens -= start is not None
            self._read_inside(head if start is None else text[len(start) :])
        elif start is not None:
            self.place, self.has_begun = ReasoningPosition.INSIDE, True
            self._read_inside(text[len(start) :])
        else:
            self.place = ReasoningPosition.AFTER

    def _read_inside(self, piece: bytes) -> None:
        text, self._call, self._tail = (self._call or self._tail) + piece, b"", b""
        self.place = ReasoningPosition.INSIDE
        while (found := self._marks.search(text)) is not None:
            rest = text[found.end() :]
            if found[0] in self._ends or not self._call_heads or rest.startswith(self._call_heads):
                self.place = ReasoningPosition.AFTER
                return
            if any(head.startswith(rest) for head in self._call_heads):
                self.place, self._call = ReasoningPosition.AFTER, text[found.start() :]
                return
            text = rest
        self._tail = text[-self._tail_bytes :] if self._tail_bytes else b""
