"""Every library keeps an answer's place alike: what its mask allows is accepted, what is taken back is as before."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest

from quire.config.structured_outputs import BACKENDS, StructuredOutputsConfig
from quire.core.reasoning import ReasoningDelimiters
from quire.core.structured_outputs import StructuredOutputsParams
from quire.structured_output.answer_steps import Trial
from quire.structured_output.choose import resolve_structured_outputs
from quire.structured_output.interface import MAX_ROLLBACK, CompiledGrammar, GrammarError, GrammarSpec, Matcher
from quire.structured_output.one_spelling import Spellings
from quire.structured_output.reasoning_gate import ReasoningGatedMatcher
from quire.structured_output.reasoning_state import ReasoningMasks, ReasoningState
from quire.structured_output.spec import spec_of
from tests.structured.libraries import BYTES, EOS, accepts, backend, compiled, needs_libraries

pytestmark = needs_libraries
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 4}, "n": {"type": "integer"},
        "tags": {"type": "array", "items": {"enum": ["a", "bé"]}},
    },
    "required": ["name", "tags"], "additionalProperties": False,
}  # fmt: skip
FORMS = {
    "json": ("json", json.dumps(SCHEMA)),
    "regex": ("regex", "(ab|a)c{1,3}é?"),
    "choice": ("choice", json.dumps(["a", "ab", 'q"', "é\n"])),
}


def allowed(state: Matcher) -> set[int]:
    bitmask = np.empty((1, 9), dtype=np.int32)
    state.fill_bitmask(bitmask, 0)
    return set(np.flatnonzero(np.unpackbits(bitmask.view(np.uint8), bitorder="little")[: EOS + 1]).tolist())


@pytest.mark.parametrize("library", BACKENDS)
@pytest.mark.parametrize("form", FORMS)
def test_exactly_what_the_mask_allows_is_accepted_and_taken_back(library: str, form: str):
    rng = random.Random(form)
    grammar = compiled(library, *FORMS[form])
    for _ in range(3):
        state, masks = grammar.start(), []
        while not state.is_terminated() and len(masks) < 60:
            masks.append(allowed(state))
            refused = rng.sample(sorted(set(range(EOS + 1)) - masks[-1]), 3)
            assert not any(state.accept(token_id) for token_id in refused)
            taken = EOS if EOS in masks[-1] else rng.choice(sorted(masks[-1]))
            assert state.accept(taken) and state.is_terminated() == (taken == EOS)
        for count in (1, 2, 3):
            if len(masks) > count:
                state.rollback(count)
                masks = masks[: len(masks) - count]
                masks.append(allowed(state))
                assert not state.is_terminated()
                assert state.accept(min(masks[-1]))


def wrapped(grammar: CompiledGrammar, how: str) -> Matcher:
    """An answer's matcher as the engine makes it, with what lies around a library's."""
    if how == "one spelling":
        return Spellings(BYTES).guarded(grammar).start()
    if how == "reasoning":
        delimiters = ReasoningDelimiters(
            starts=("<t>",), ends=("</t>",), is_open=False, start_ids=(tuple(b"<t>"),), end_ids=tuple(b"</t>")
        )
        state = ReasoningState(delimiters, BYTES, shows_special=False, budget=4)
        return ReasoningGatedMatcher(grammar, state, ReasoningMasks(BYTES), [EOS])
    return grammar.start()


@pytest.mark.parametrize("library", BACKENDS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("how", ["alone", "one spelling", "reasoning"])
def test_tokens_that_are_tried_and_taken_back_leave_no_trace(library: str, form: str, how: str):
    """As drafts are: up to 32 tokens ahead, through the end and what is refused, again and again, from everywhere."""
    rng, grammar = random.Random(form + how), compiled(library, *FORMS[form])
    state, plain = wrapped(grammar, how), wrapped(grammar, how)
    for _ in range(12):
        for num_ahead in (1, 3, MAX_ROLLBACK):
            trial = Trial(state, EOS, ())
            for _ in range(num_ahead):
                possible = sorted(allowed(state)) if not state.is_terminated() else [EOS]
                assert trial.advance(rng.choice(possible)) or state.is_terminated()
            if how != "reasoning":  # within which a token that its mask excludes is followed all the same
                refused = sorted(set(range(EOS)) - (set() if state.is_terminated() else allowed(state)))
                assert not any(map(trial.advance, rng.sample(refused, 3)))
            trial.take_back()
            assert allowed(state) == allowed(plain) and state.is_terminated() == plain.is_terminated()
        token_id = rng.choice(sorted(allowed(plain) - {EOS} or {EOS}))
        assert state.accept(token_id) and plain.accept(token_id)
        if token_id == EOS:
            return


def most_spaces(state: Matcher, before: bytes) -> int:
    """So many may follow each other behind that text, of 60 that are tried."""
    assert all(map(state.accept, before))
    return next((number for number in range(60) if not state.accept(ord(" \n"[number % 2]))), 60)


@pytest.mark.parametrize(("library", "most"), [("xgrammar", 20), ("guidance", 20), ("outlines", 8)])
def test_whitespace_between_the_parts_of_json_is_bounded(library: str, most: int):
    text = json.dumps(SCHEMA)
    grammar = compiled(library, "json", text, any_whitespace=True, max_whitespace_cnt=20)
    for before in b'{"name":"x","tags":["a"', b'{"name":"x","tags":[', b'{"name":"x",', b'{"name":', b'{"name"', b"{":
        found = most_spaces(grammar.start(), before)
        assert found == most or (library == "outlines" and before.endswith(b"[") and found == 2 * most)
    assert most_spaces(compiled(library, "json", text, any_whitespace=True).start(), b"{") == 60
    assert accepts(grammar, json.dumps({"name": 4 * " ", "tags": ["a"]}, indent=3)), "within a text it is not"


def test_whitespace_in_the_arguments_of_a_structural_tag_is_bounded_unless_the_tag_says_more():
    config = StructuredOutputsConfig(backend="xgrammar")
    for own, most in ((None, 20), (3, 3)):
        content = {"type": "json_schema", "json_schema": SCHEMA, **({} if own is None else {"max_whitespace_cnt": own})}
        tag = {"type": "structural_tag", "format": {"type": "tag", "begin": "<f>", "content": content, "end": "</f>"}}
        spec = spec_of(resolve_structured_outputs(StructuredOutputsParams(structural_tag=tag), config))
        assert most_spaces(compiled("xgrammar", "structural_tag", spec.text).start(), b"<f>{") == most


@pytest.mark.parametrize("library", BACKENDS)
def test_answers_of_one_grammar_do_not_disturb_each_other(library: str):
    grammar = compiled(library, "json", json.dumps(SCHEMA))
    first, second = grammar.start(), grammar.start()
    for byte in b'{"name":"x"':
        assert first.accept(byte)
    before = allowed(first)
    assert second.accept(ord("{")) and not second.accept(ord("x"))
    assert allowed(first) == before and all(map(first.accept, b',"tags":["a"]}')) and first.accept(EOS)


@pytest.mark.parametrize("library", BACKENDS)
def test_after_the_end_nothing_is_accepted_and_before_it_the_end_is_not(library: str):
    state = compiled(library, "regex", "ab").start()
    assert not state.accept(EOS) and state.accept(ord("a")) and not state.accept(EOS)
    assert state.accept(ord("b")) and state.accept(EOS) and state.is_terminated()
    assert not state.accept(ord("b"))
    state.rollback(1)
    assert not state.is_terminated() and state.accept(EOS)


@pytest.mark.parametrize("library", BACKENDS)
@pytest.mark.parametrize("kind", ["grammar", "structural_tag"])
def test_a_kind_that_a_library_does_not_know_is_refused_when_it_is_compiled(library: str, kind: str):
    if library in ("xgrammar", "guidance"):
        pytest.skip("it knows it")
    with pytest.raises(GrammarError):
        backend(library).compile(GrammarSpec(kind=kind, text="{}", backend=library))


WRONG_JSON = ['{"a":1,}', '{"a":1.e5}', '{"a":01}', '{"a":"\\ud800"}', '{"a":"\t"}', '{"a":+1}', '{"a":1}}', "{'a':1}"]


@pytest.mark.parametrize("library", BACKENDS)
@pytest.mark.parametrize("text", WRONG_JSON)
def test_what_is_no_json_is_never_written(library: str, text: str):
    schema = {
        "type": "object",
        "properties": {"a": {"anyOf": [{"type": "number"}, {"type": "string", "maxLength": 9}]}},
    }
    if text == '{"a":"\\ud800"}' and library == "xgrammar":
        pytest.skip("it counts halves of surrogate pairs as characters")
    for has_whitespace in (True, False):
        grammar = compiled(library, "json", json.dumps(schema), any_whitespace=has_whitespace)
        assert not accepts(grammar, text) and accepts(grammar, '{"a":1}')


@pytest.mark.parametrize("text", ["1e-5", "-0.5", "1.0", "1.5"])
def test_lm_format_enforcer_writes_only_whole_integers(text: str):
    grammar = compiled("lm-format-enforcer", "json", '{"type": "integer"}')
    assert not accepts(grammar, text) and accepts(grammar, "-105") and accepts(grammar, "0")


def test_lm_format_enforcer_keeps_no_more_than_it_can_take_back():
    state = compiled("lm-format-enforcer", "regex", "[a-z]*").start()
    assert all(state.accept(ord("a")) for _ in range(500))
    state.rollback(32)
    with pytest.raises(GrammarError):
        state.rollback(1)
