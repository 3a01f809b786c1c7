"""Where an answer stands in its reasoning, by its tokens: grammars begin after it, and a budget ends it.

Owned by the grammar manager, one for each answer with a grammar or a budget. What delimits the reasoning is followed by
`quire.core.reasoning`; here tokens become bytes, a used-up budget forces the tokens that end it, and masks are made.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np

from quire.core.grammar_bitmask import mask_of
from quire.core.reasoning import SPACES, ReasoningDelimiters, ReasoningPosition, ReasoningTracker
from quire.structured_output.interface import Vocabulary


class ReasoningState:
    """One answer's.

    Args:
        delimiters: of its reasoning.
        vocabulary: bytes of tokens.
        shows_special: control tokens are part of the text; those that are delimiters are taken for it in any case.
        budget: tokens of reasoning after which it is ended; None = any number.
    """

    def __init__(
        self, delimiters: ReasoningDelimiters, vocabulary: Vocabulary, *, shows_special: bool, budget: int | None = None
    ) -> None:
        self._delimiters = delimiters
        self._vocabulary = vocabulary
        named = {text.encode() for text in (*delimiters.starts, *delimiters.ends)}
        special = vocabulary.special_pieces.items()
        self._special = {one: piece for one, piece in special if shows_special or piece in named}
        self._budget = budget
        self._so_far: tuple[int, ...] = ()  # tokens before the reasoning
        self._num_forced: int | None = None
        self._tracker = ReasoningTracker(delimiters)
        self._note_budget()

    @property
    def place(self) -> ReasoningPosition:
        """Of the next token."""
        return self._tracker.place

    @property
    def has_begun(self) -> bool:
        """There was reasoning, or there is."""
        return self._tracker.has_begun

    @property
    def num_tokens(self) -> int:
        """Tokens of reasoning, its delimiters left out."""
        return self._tracker.num_tokens

    @property
    def forced_id(self) -> int | None:
        """The only token that is possible next, as the budget is used up; None = the budget does not matter here."""
        if self._num_forced is None or self.place is not ReasoningPosition.INSIDE:
            return None
        return self._delimiters.end_ids[self._num_forced]

    def push(self, token_id: int) -> None:
        """The next token of the answer."""
        place = self.place
        if place is ReasoningPosition.AFTER:
            return
        if place is ReasoningPosition.BEFORE:
            self._so_far += (token_id,)
        self._tracker.push(self._vocabulary.pieces[token_id] or self._special.get(token_id, b""))
        if (
            place is ReasoningPosition.INSIDE
            and self.place is ReasoningPosition.INSIDE
            and self._num_forced is not None
        ):
            self._num_forced += 1
            if self._num_forced == len(self._delimiters.end_ids):
                self._tracker.end()
        self._note_budget()

    def copied(self) -> ReasoningState:
        """The same place in the same answer; what is pushed to one changes the other no more."""
        other = copy.copy(self)
        other._tracker = copy.copy(self._tracker)
        return other

    def start_ids(self) -> set[int]:
        """Tokens that go on with a delimiter that begins the reasoning, where it may begin."""
        if self.place is not ReasoningPosition.BEFORE:
            return set()
        size = len(self._so_far)
        return {ids[size] for ids in self._delimiters.start_ids if len(ids) > size and ids[:size] == self._so_far}

    def num_begun(self) -> dict[bytes, tuple[int, ...]]:
        """As `ReasoningTracker.num_begun`."""
        return self._tracker.num_begun()

    def _note_budget(self) -> None:
        if self._budget is None or self._num_forced is not None or self.place is not ReasoningPosition.INSIDE:
            return
        if self.num_tokens >= self._budget:
            self._num_forced = 0


class ReasoningMasks:
    """Masks of tokens that the reasoning may go on with, before a grammar begins.

    A token that ends the reasoning and goes on with anything but white space is left out: its rest would be a part of
    the answer that no grammar has seen.

    Args:
        vocabulary: of the model.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._too_long: dict[tuple[bytes, int], np.ndarray] = {}

    def fill(self, state: ReasoningState, end_ids: Sequence[int], line: np.ndarray) -> None:
        """Write the tokens that an answer may go on with inside of its reasoning, which cannot be its end.

        Args:
            end_ids: tokens that end an answer.
            line: [bitmask_size] int32.
        """
        line[:] = ~mask_of(end_ids, self._vocabulary.vocab_size)
        for end, counts in state.num_begun().items():
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
