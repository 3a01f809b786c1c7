"""Grammars that begin after an answer's reasoning, and a budget that ends it. Made by the grammar manager.

A `ReasoningGatedMatcher` is a `Matcher` like any other: a pure function of the answer's tokens. While the answer
reasons, the grammar itself does not advance.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from quire.core.grammar_bitmask import allow, allow_only
from quire.core.reasoning import ReasoningPosition
from quire.structured_output.interface import MAX_ROLLBACK, CompiledGrammar, GrammarError, Matcher
from quire.structured_output.reasoning_state import ReasoningMasks, ReasoningState


class _Place(NamedTuple):
    """Where an answer stood before a token, and whether its grammar took the token."""

    state: ReasoningState
    grammar: Matcher | None
    has_advanced: bool


class FreeText(CompiledGrammar):
    """The grammar of every answer, for requests that have a budget of reasoning and no grammar."""

    def start(self) -> Matcher:
        """As `CompiledGrammar.start`."""
        return _Free()


class _Free(Matcher):
    @property
    def is_free(self) -> bool:
        return True

    def accept(self, token_id: int) -> bool:
        return True

    def rollback(self, num_tokens: int) -> None:
        pass

    def fill_bitmask(self, bitmask: np.ndarray, row: int) -> None:
        bitmask[row] = -1

    def is_terminated(self) -> bool:
        return False


class ReasoningGatedMatcher(Matcher):
    """Where one answer stands in its reasoning, and then in the grammar for what follows it.

    Where the reasoning may begin, its first delimiter and the grammar's first tokens are both possible. An answer
    cannot end inside of its reasoning, as it would not have its form.

    Args:
        compiled: the grammar.
        state: of the answer's reasoning, at its beginning.
        masks: of tokens inside of the reasoning.
        end_ids: tokens that end an answer.
    """

    def __init__(
        self, compiled: CompiledGrammar, state: ReasoningState, masks: ReasoningMasks, end_ids: Sequence[int]
    ) -> None:
        self._compiled = compiled
        self._state = state
        self._masks = masks
        self._end_ids = end_ids
        self._is_free = isinstance(compiled, FreeText)
        self._grammar: Matcher | None = compiled.start()  # None where only the reasoning can go on
        self._places: deque[_Place] = deque(maxlen=MAX_ROLLBACK)  # before each of the newest tokens

    @property
    def is_free(self) -> bool:
        """As `Matcher.is_free`."""
        return self._is_free and self._state.forced_id is None

    def accept(self, token_id: int) -> bool:
        """As `Matcher.accept`."""
        before, grammar = self._state, self._grammar
        if before.place is ReasoningPosition.AFTER:
            if grammar is None or not grammar.accept(token_id):
                return False
            self._places.append(_Place(before, grammar, has_advanced=True))
            return True
        state, has_advanced = before.copied(), False
        state.push(token_id)
        if state.place is ReasoningPosition.INSIDE:
            self._grammar = None
        elif state.has_begun:
            self._grammar = self._compiled.start()
        else:
            has_advanced = grammar is not None and grammar.accept(token_id)
            if not has_advanced and state.place is not ReasoningPosition.BEFORE:
                return False
            self._grammar = grammar if has_advanced else None
        self._state = state
        self._places.append(_Place(before, grammar, has_advanced))
        return True

    def rollback(self, num_tokens: int) -> None:
        """As `Matcher.rollback`."""
        if num_tokens > len(self._places):
            raise GrammarError(f"{num_tokens} tokens are more than can be taken back")
        for _ in range(num_tokens):
            place = self._places.pop()
            self._state, self._grammar = place.state, place.grammar
            if place.has_advanced and place.grammar is not None:
                place.grammar.rollback(1)

    def fill_bitmask(self, bitmask: np.ndarray, row: int) -> None:
        """As `Matcher.fill_bitmask`."""
        state = self._state
        forced_id = state.forced_id
        if forced_id is not None:
            allow_only(bitmask[row], forced_id)
        elif state.place is ReasoningPosition.INSIDE:
            if self._is_free:
                bitmask[row] = -1
            else:
                self._masks.fill(state, self._end_ids, bitmask[row])
        else:
            if self._grammar is None:
                bitmask[row] = 0
            else:
                self._grammar.fill_bitmask(bitmask, row)
            allow(bitmask[row], state.start_ids())

    def is_terminated(self) -> bool:
        """As `Matcher.is_terminated`."""
        return self._grammar is not None and self._grammar.is_terminated()
