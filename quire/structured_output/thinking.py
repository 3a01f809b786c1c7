"""Where an answer stands in its thinking, told from its tokens alone: grammars begin after it, and a budget ends it.

Owned by the grammar manager, one for each answer with a grammar or a budget. Texts are compared as bytes, whatever
tokens they are written with, so that this and the parser of the answer's text always agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

import numpy as np

from quire.core.grammar_bitmask import mask_of
from quire.core.thinking import ThinkingMarks
from quire.structured_output.interface import Vocabulary

SPACES = b" \t\r\n"
MAX_SPACES = 1024
"""White space before the mark that begins the thinking, in bytes, as the parsers have it."""


class Place(Enum):
    """Where the next token stands."""

    BEFORE = "before"
    """Thinking may begin here, or the answer."""
    INSIDE = "inside"
    AFTER = "after"
    """What comes is the answer; it stays so."""


class Thinking:
    """One answer's.

    Args:
        marks: of its thinking.
        vocabulary: bytes of tokens.
        shows_special: control tokens are part of the text; those that are marks are taken for it in any case.
        budget: tokens of thinking after which it is ended; None = any number.

    Attributes:
        place: of the next token.
        has_begun: there was thinking, or there is.
        num_tokens: tokens of thinking, its marks left out.
    """

    def __init__(
        self, marks: ThinkingMarks, vocabulary: Vocabulary, *, shows_special: bool, budget: int | None = None
    ) -> None:
        self._marks = marks
        self._shows_special = shows_special
        self._starts = tuple(text.encode() for text in marks.starts)
        self._ends = tuple(text.encode() for text in marks.ends)
        self._tail_bytes = max(map(len, self._ends)) - 1
        self._vocabulary = vocabulary
        marked = {*self._starts, *self._ends}
        special = vocabulary.special_pieces.items()
        self._special = {one: piece for one, piece in special if shows_special or piece in marked}
        self._budget = budget
        self._head: bytes | None = b""  # the beginning of the answer, until it tells whether a mark stands there
        self._tail = b""
        self._so_far: tuple[int, ...] = ()
        self._num_forced: int | None = None
        self.place = Place.INSIDE if marks.is_open else Place.BEFORE
        self.has_begun = marks.is_open
        self.num_tokens = 0
        self._note_budget()

    @property
    def forced_id(self) -> int | None:
        """The only token that is possible next, as the budget is used up; None = the budget does not matter here."""
        if self._num_forced is None or self.place is not Place.INSIDE:
            return None
        return self._marks.end_ids[self._num_forced]

    def push(self, token_id: int) -> None:
        """The next token of the answer."""
        if self.place is Place.AFTER:
            return
        piece = self._vocabulary.pieces[token_id] or self._special.get(token_id, b"")
        was_inside = self.place is Place.INSIDE
        if self._head is not None:
            self._read_head(token_id, piece)
        elif was_inside:
            self._read_inside(piece)
        if was_inside and self.place is Place.INSIDE:
            self.num_tokens += 1
            if self._num_forced is not None:
                self._num_forced += 1
                if self._num_forced == len(self._marks.end_ids):
                    self.place = Place.AFTER
        self._note_budget()

    def restarted(self) -> Thinking:
        """The same answer at its beginning."""
        return Thinking(self._marks, self._vocabulary, shows_special=self._shows_special, budget=self._budget)

    def start_ids(self) -> set[int]:
        """Tokens that go on with a mark that begins the thinking, where it may begin."""
        if self.place is not Place.BEFORE:
            return set()
        size = len(self._so_far)
        return {ids[size] for ids in self._marks.start_ids if len(ids) > size and ids[:size] == self._so_far}

    def num_begun(self) -> dict[bytes, tuple[int, ...]]:
        """End mark -> how many of its bytes the thinking may have written last, 0 included."""
        return {end: tuple(n for n in range(len(end)) if self._tail.endswith(end[:n])) for end in self._ends}

    def _read_head(self, token_id: int, piece: bytes) -> None:
        """Until it is decided whether the answer begins with a mark; inside, that is one that was there before."""
        assert self._head is not None
        self._head += piece
        self._so_far += (token_id,)
        text = self._head.lstrip(SPACES)
        has_room = len(self._head) - len(text) <= MAX_SPACES
        start = next((one for one in self._starts if text.startswith(one)), None) if has_room else None
        if start is None and has_room and any(one.startswith(text) for one in self._starts):
            if self.place is Place.INSIDE:
                self._tail = (self._tail + piece)[-self._tail_bytes :]
            return
        head, self._head = self._head, None
        if self.place is Place.INSIDE:
            self._tail = b""
            self.num_tokens -= start is not None
            self._read_inside(head)
        elif start is not None:
            self.place, self.has_begun = Place.INSIDE, True
            self._read_inside(text[len(start) :])
        else:
            self.place = Place.AFTER

    def _read_inside(self, piece: bytes) -> None:
        text = self._tail + piece
        if any(end in text for end in self._ends):
            self.place = Place.AFTER
        self._tail = text[-self._tail_bytes :] if self._tail_bytes else b""

    def _note_budget(self) -> None:
        if self._budget is None or self._num_forced is not None or self.place is not Place.INSIDE:
            return
        if self.num_tokens >= self._budget:
            self._num_forced = 0


class ThinkingMasks:
    """Masks of tokens that the thinking may go on with, before a grammar begins.

    A token that ends the thinking and goes on with anything but white space is left out: its rest would be a part of
    the answer that no grammar has seen.

    Args:
        vocabulary: of the model.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._too_long: dict[tuple[bytes, int], np.ndarray] = {}

    def fill(self, thinking: Thinking, end_ids: Sequence[int], line: np.ndarray) -> None:
        """Write the tokens that an answer may go on with inside of its thinking, which cannot be its end.

        Args:
            end_ids: tokens that end an answer.
            line: [bitmask_size] int32.
        """
        line[:] = ~mask_of(end_ids, self._vocabulary.vocab_size)
        for end, counts in thinking.num_begun().items():
            for num_begun in counts:
                line &= ~self._overshooting(end, num_begun)

    def _overshooting(self, end: bytes, num_begun: int) -> np.ndarray:
        """[bitmask_size] int32: tokens that write the rest of `end`, of which so many bytes stand there, and more."""
        key = (end, num_begun)
        if key not in self._too_long:
            rest = end[num_begun:]
            pieces = enumerate(self._vocabulary.pieces)
            if num_begun:
                found = [i for i, piece in pieces if piece.startswith(rest) and piece[len(rest) :].strip(SPACES)]
            else:
                found = [i for i, piece in pieces if rest in piece and piece.split(rest, 1)[1].strip(SPACES)]
            self._too_long[key] = mask_of(found, self._vocabulary.vocab_size)
        return self._too_long[key]
