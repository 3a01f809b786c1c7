"""How an answer begins in its grammar, and goes on; in the engine core and in a process that follows. No state."""

from __future__ import annotations

from quire.structured_output.follow_messages import FollowStart
from quire.structured_output.interface import MAX_ROLLBACK, CompiledGrammar, Matcher, Vocabulary
from quire.structured_output.reasoning_gate import ReasoningGatedMatcher
from quire.structured_output.reasoning_state import ReasoningMasks, ReasoningState


def begin(
    compiled: CompiledGrammar, start: FollowStart, vocabulary: Vocabulary, masks: ReasoningMasks | None
) -> Matcher:
    """The place of a new answer, which may reason before its grammar begins; then there are `masks`."""
    if start.reasoning is None or masks is None:
        return compiled.start()
    state = ReasoningState(start.reasoning, vocabulary, shows_special=start.shows_special, budget=start.budget)
    return ReasoningGatedMatcher(compiled, state, masks, (vocabulary.eos_token_id, *start.end_ids))


class Trial:
    """Takes a grammar through tokens that may not stand, and back.

    Args:
        grammar, eos_token_id, end_ids: as `advance` has them.
    """

    def __init__(self, grammar: Matcher, eos_token_id: int, end_ids: tuple[int, ...]) -> None:
        self._grammar = grammar
        self._eos_token_id = eos_token_id
        self._end_ids = end_ids
        self._num_accepted = 0

    def advance(self, token_id: int) -> bool:
        """As `advance`; False where no more could be taken back, too."""
        was_terminated = self._grammar.is_terminated()
        if self._num_accepted == MAX_ROLLBACK or not advance(
            self._grammar, token_id, self._eos_token_id, self._end_ids
        ):
            return False
        self._num_accepted += not was_terminated
        return True

    def take_back(self) -> None:
        """The grammar is where it was."""
        if self._num_accepted:
            self._grammar.rollback(self._num_accepted)
        self._num_accepted = 0


def advance(grammar: Matcher, token_id: int, eos_token_id: int, end_ids: tuple[int, ...]) -> bool:
    """Take the grammar through a token; whatever ends an answer is to it the primary end."""
    if token_id in end_ids:
        token_id = eos_token_id
    if grammar.is_terminated():
        return token_id == eos_token_id
    return grammar.accept(token_id)
