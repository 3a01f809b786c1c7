"""How an answer begins in its grammar, and goes on; in the engine core and in a process that follows. No state."""

from __future__ import annotations

from quire.structured_output.follow_messages import FollowStart
from quire.structured_output.interface import CompiledGrammar, Matcher, Vocabulary
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


def advance(grammar: Matcher, token_id: int, eos_token_id: int, end_ids: tuple[int, ...]) -> bool:
    """Take the grammar through a token; whatever ends an answer is to it the primary end."""
    if token_id in end_ids:
        token_id = eos_token_id
    if grammar.is_terminated():
        return token_id == eos_token_id
    return grammar.accept(token_id)
