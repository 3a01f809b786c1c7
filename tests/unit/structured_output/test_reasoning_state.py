"""Where an answer stands in its thinking, by its tokens, is what the parser of its text says."""

from __future__ import annotations

import random

import numpy as np
import pytest

from quire.core.reasoning import ReasoningDelimiters, ReasoningPosition
from quire.parsers.base import ReasoningParser
from quire.parsers.reasoning.deepseek_r1 import DeepSeekR1Parser
from quire.parsers.reasoning.granite import GraniteReasoningParser
from quire.parsers.reasoning.tags import TagParser
from quire.structured_output.interface import CompiledGrammar, Matcher, Vocabulary
from quire.structured_output.reasoning_gate import FreeText, ReasoningGatedMatcher
from quire.structured_output.reasoning_state import ReasoningMasks, ReasoningState

EOS = 256
MARK = 300
WORDS = (
    b"<think>", b"</think>", b"<th", b"ink>", b"</th", b">\n", b">x", b"ink>{", b"\n\n", b"a</think>b",
    b"Here is my thought process:", b"Here", b"'s my response:", b" is my response:", b"think", b"k>\n\n",
)  # fmt: skip
PIECES = (*(bytes([byte]) for byte in range(256)), b"", *WORDS)
VOCABULARY = Vocabulary((*PIECES, *([b""] * (MARK + 1 - len(PIECES)))), EOS, {MARK: b"</think>", EOS: b"<eos>"})
FIRST_WORD = 257


def token(text: bytes) -> int:
    return PIECES.index(text)


def marks_of(parser: ReasoningParser) -> ReasoningDelimiters:
    assert parser.starts is not None and parser.ends is not None
    ends = tuple(token(text.encode()) for text in parser.ends.texts if text.encode() in PIECES)
    return ReasoningDelimiters(
        starts=parser.starts.texts, ends=parser.ends.texts, is_open=parser.is_inside,
        start_ids=((token(b"<th"), token(b"ink>")),), end_ids=ends[:1] or (token(b"</th"), token(b"ink>")),
    )  # fmt: skip


def reasoning(parser: ReasoningParser, budget: int | None = None, *, shows_special: bool = True) -> ReasoningState:
    return ReasoningState(marks_of(parser), VOCABULARY, shows_special=shows_special, budget=budget)


def random_tokens(rng: random.Random) -> list[int]:
    """Text in which marks, and parts of them, are frequent."""
    words = [*range(FIRST_WORD, len(PIECES)), MARK, *(list(b"a <\n"))]
    return [rng.choice(words) for _ in range(rng.randint(1, 12))]


@pytest.mark.parametrize("tail", ["", "<think>", "</think>"], ids=["no-mark", "open", "ended"])
@pytest.mark.parametrize("kind", [TagParser, DeepSeekR1Parser, GraniteReasoningParser])
def test_tokens_and_text_agree_where_the_thinking_ends(kind: type[ReasoningParser], tail: str):
    for seed in range(400):
        parser = kind(tail)
        state = reasoning(parser)
        num_inside = 0
        for token_id in random_tokens(random.Random(seed)):
            was_inside = parser.is_inside
            state.push(token_id)
            parser.push((PIECES[token_id] if token_id < len(PIECES) else b"</think>").decode())
            num_inside += was_inside and parser.is_inside
            assert (state.place is ReasoningPosition.INSIDE) == parser.is_inside
            assert state.num_tokens == num_inside - parser.has_redundant_start_tag


def test_a_control_token_may_be_the_mark_and_others_are_text_where_it_shows_them():
    for shows_special in (True, False):
        state = reasoning(TagParser("<think>"), shows_special=shows_special)
        state.push(MARK)
        assert state.place is ReasoningPosition.AFTER
        state = reasoning(TagParser(""), shows_special=shows_special)
        state.push(EOS)
        assert (state.place is ReasoningPosition.AFTER) == shows_special


@pytest.mark.parametrize("budget", [0, 1, 5])
@pytest.mark.parametrize("is_open", [True, False], ids=["open", "begun-by-the-model"])
def test_a_budget_ends_the_thinking_after_exactly_so_many_tokens(budget: int, is_open: bool):
    state = reasoning(TagParser("<think>" if is_open else ""), budget)
    written = [] if is_open else [token(b"<think>")]
    for token_id in written:
        assert state.forced_id is None
        state.push(token_id)
    num_free = 0
    while state.forced_id is None:
        state.push(ord("a"))
        num_free += 1
    assert num_free == budget == state.num_tokens
    assert state.forced_id == token(b"</think>")
    state.push(state.forced_id)
    assert state.place is ReasoningPosition.AFTER and state.forced_id is None and state.num_tokens == budget


def test_a_mark_of_several_tokens_is_forced_one_after_another():
    marks = ReasoningDelimiters(
        starts=("<think>",), ends=("</think>",), is_open=True, end_ids=(token(b"</th"), token(b"ink>"))
    )
    state = ReasoningState(marks, VOCABULARY, shows_special=True, budget=2)
    forced = []
    for token_id in (ord("a"), ord("<")):  # the model's own beginning of a mark does not matter
        state.push(token_id)
    while state.forced_id is not None:
        forced.append(state.forced_id)
        state.push(state.forced_id)
    assert forced == [token(b"</th"), token(b"ink>")] and state.place is ReasoningPosition.AFTER


def test_an_answer_that_does_not_think_is_not_forced():
    state = reasoning(TagParser(""), budget=0)
    for token_id in b"four":
        state.push(token_id)
    assert state.forced_id is None and state.place is ReasoningPosition.AFTER


class Digits(CompiledGrammar):
    """Three digits, and the end."""

    def start(self) -> Matcher:
        return _Digits()


class _Digits(Matcher):
    def __init__(self) -> None:
        self.tokens: list[int] = []

    def _allowed(self) -> list[int]:
        return [EOS] if len(self.tokens) == 3 else [] if len(self.tokens) > 3 else list(b"0123456789")

    def accept(self, token_id: int) -> bool:
        if token_id not in self._allowed():
            return False
        self.tokens.append(token_id)
        return True

    def rollback(self, num_tokens: int) -> None:
        del self.tokens[len(self.tokens) - num_tokens :]

    def fill_bitmask(self, bitmask: np.ndarray, row: int) -> None:
        bitmask[row] = 0
        for token_id in self._allowed():
            bitmask.view(np.uint32)[row, token_id >> 5] |= np.uint32(1 << (token_id & 31))

    def is_terminated(self) -> bool:
        return len(self.tokens) > 3


def delayed(
    tail: str = "", budget: int | None = None, compiled: CompiledGrammar | None = None
) -> ReasoningGatedMatcher:
    return ReasoningGatedMatcher(
        compiled or Digits(), reasoning(TagParser(tail), budget), ReasoningMasks(VOCABULARY), (EOS, 5)
    )


def possible(grammar: Matcher) -> set[int]:
    line = np.zeros((2, VOCABULARY.bitmask_size), dtype=np.int32)
    grammar.fill_bitmask(line, 1)
    assert not line[0].any()
    bits = np.unpackbits(line[1].view(np.uint8), bitorder="little")[: VOCABULARY.vocab_size]
    return set(np.flatnonzero(bits).tolist())


def test_a_grammar_begins_after_the_thinking_that_the_prompt_began():
    grammar = delayed("<think>")
    everything = set(range(VOCABULARY.vocab_size))
    assert possible(grammar) == everything - {EOS, 5, token(b"a</think>b")}, "an answer does not end inside of it"
    for token_id in (ord("1"), token(b"</th")):
        assert grammar.accept(token_id)
    assert token(b"ink>{") not in possible(grammar), "its rest would be no part of the grammar"
    assert token(b"ink>") in possible(grammar) and token(b"think") in possible(grammar)
    assert grammar.accept(token(b"ink>")) and possible(grammar) == set(b"0123456789")
    assert all(map(grammar.accept, [*b"123", EOS])) and grammar.is_terminated()


def test_white_space_behind_the_mark_belongs_to_it():
    grammar = delayed("<think>")
    assert all(map(grammar.accept, [token(b"</th"), ord("i"), ord("n"), token(b"k>\n\n")]))
    assert possible(grammar) == set(b"0123456789")


def test_the_model_may_think_or_answer_at_once():
    grammar = delayed()
    assert possible(grammar) == {*b"0123456789", token(b"<th")}
    assert grammar.accept(ord("7")) and possible(grammar) == set(b"0123456789"), "it answers"
    grammar = delayed()
    assert grammar.accept(token(b"<th")) and possible(grammar) == {token(b"ink>")}
    assert grammar.accept(token(b"ink>")) and grammar.accept(ord("x"))
    assert grammar.accept(token(b"</think>")) and possible(grammar) == set(b"0123456789")


def test_a_token_against_the_grammar_is_refused():
    grammar = delayed()
    assert not grammar.accept(ord("x"))
    grammar = delayed("<think>")
    assert grammar.accept(token(b"</think>")) and not grammar.accept(ord("x"))


def test_a_budget_without_a_grammar_needs_a_mask_only_where_the_mark_is_forced():
    grammar = delayed("<think>", 2, FreeText())
    assert grammar.is_free
    assert grammar.accept(1) and grammar.is_free and grammar.accept(EOS) and not grammar.is_free
    assert possible(grammar) == {token(b"</think>")}
    assert grammar.accept(token(b"</think>")) and grammar.is_free and not grammar.is_terminated()


def test_rolling_back_is_as_if_the_tokens_had_not_come():
    tokens = [token(b"<th"), token(b"ink>"), ord("x"), token(b"</think>"), *b"12"]
    for size in range(len(tokens)):
        for num_back in range(len(tokens) - size + 1):
            grammar, other = delayed(budget=4), delayed(budget=4)
            assert all(map(grammar.accept, tokens[: size + num_back]))
            grammar.rollback(num_back)
            assert all(map(other.accept, tokens[:size]))
            assert possible(grammar) == possible(other)
            assert all(map(grammar.accept, tokens[size:]))
