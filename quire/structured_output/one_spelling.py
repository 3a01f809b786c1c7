r"""JSON in which every text has one spelling: no escape of a character that needs none, and no second one of any.

A library keeps a name that may be anything apart from the declared ones by their spelling: `"\u0061"` would pass for
another name than `"a"`, and its value go by the wrong schema. Whatever the library allows, such escapes are not written
where further names may follow. Wraps a library's grammar; each answer keeps where it stands within an escape.
"""

from __future__ import annotations

import json
from collections import deque
from typing import Any

import numpy as np

from quire.core.grammar_bitmask import pack_mask
from quire.structured_output.interface import MAX_ROLLBACK, CompiledGrammar, GrammarSpec, Matcher, Vocabulary
from quire.structured_output.structural_tags import grammar_of_text, schemas_of

_OUTSIDE, _BACKSLASH, _U, _U0, _U00, _U000, _U001 = range(7)
_HEX = b"0123456789abcdef"
# Of the control characters: those that have a short escape, \b \t \n \f \r, are written by it.
_LONG = frozenset(_HEX) - frozenset(b"89acd")
_NEXT: dict[int, dict[int, int]] = {
    _BACKSLASH: {**dict.fromkeys(b'"\\bfnrt', _OUTSIDE), ord("u"): _U},
    _U: {ord("0"): _U0},
    _U0: {ord("0"): _U00},
    _U00: {ord("0"): _U000, ord("1"): _U001},
    _U000: dict.fromkeys(_LONG, _OUTSIDE),
    _U001: dict.fromkeys(_HEX, _OUTSIDE),
}


def needs_one_spelling(spec: GrammarSpec) -> bool:
    """Whether names of an object may be others than those that its schema declares."""
    if spec.kind not in ("json", "structural_tag"):
        return False
    if spec.kind == "json":
        return _has_open_names(json.loads(spec.text))
    return any(_has_open_names(schema) for _, schema in schemas_of(grammar_of_text(spec.text)))


def _has_open_names(schema: Any) -> bool:
    stack = [schema]
    while stack:
        one = stack.pop()
        if isinstance(one, list):
            stack.extend(one)
        elif isinstance(one, dict):
            if "patternProperties" in one or "propertyNames" in one:
                return True
            if "properties" in one and False not in (
                one.get("additionalProperties"), one.get("unevaluatedProperties")
            ):  # fmt: skip
                return True
            stack.extend(one.values())
    return False


class Spellings:
    """Where each token of a vocabulary leads within an escape; made for each place when it is needed.

    Args:
        vocabulary: of the model.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._masks: dict[int, np.ndarray] = {}

    def mask(self, state: int) -> np.ndarray:
        """[bitmask_size] int32: tokens that may follow in `state`, and all ids without bytes."""
        if state not in self._masks:
            pieces = self._vocabulary.pieces
            is_allowed = np.ones(32 * self._vocabulary.bitmask_size, dtype=np.bool_)
            for token_id, piece in enumerate(pieces):
                if (state or b"\\" in piece) and self.after(state, piece) is None:
                    is_allowed[token_id] = False
            self._masks[state] = pack_mask(is_allowed)
        return self._masks[state]

    @staticmethod
    def after(state: int, piece: bytes) -> int | None:
        """The place behind `piece`; None when it holds an escape that is not written."""
        for byte in piece:
            if state == _OUTSIDE:
                state = _BACKSLASH if byte == 0x5C else _OUTSIDE
            else:
                following = _NEXT[state].get(byte)
                if following is None:
                    return None
                state = following
        return state

    def guarded(self, compiled: CompiledGrammar) -> CompiledGrammar:
        """`compiled` without such escapes."""
        return _Compiled(compiled, self)

    def piece(self, token_id: int) -> bytes:
        """Its bytes."""
        return self._vocabulary.pieces[token_id]


class _Compiled(CompiledGrammar):
    def __init__(self, compiled: CompiledGrammar, spellings: Spellings) -> None:
        self._compiled = compiled
        self._spellings = spellings

    def start(self) -> Matcher:
        return _OneSpelling(self._compiled.start(), self._spellings)


class _OneSpelling(Matcher):
    def __init__(self, grammar: Matcher, spellings: Spellings) -> None:
        self._grammar = grammar
        self._spellings = spellings
        self._states = deque([_OUTSIDE], maxlen=MAX_ROLLBACK + 1)

    @property
    def is_free(self) -> bool:
        return False

    def accept(self, token_id: int) -> bool:
        state = self._spellings.after(self._states[-1], self._spellings.piece(token_id))
        if state is None or not self._grammar.accept(token_id):
            return False
        self._states.append(state)
        return True

    def rollback(self, num_tokens: int) -> None:
        self._grammar.rollback(num_tokens)
        for _ in range(num_tokens):
            self._states.pop()

    def fill_bitmask(self, bitmask: np.ndarray, row: int) -> None:
        self._grammar.fill_bitmask(bitmask, row)
        bitmask[row] &= self._spellings.mask(self._states[-1])

    def is_terminated(self) -> bool:
        return self._grammar.is_terminated()
