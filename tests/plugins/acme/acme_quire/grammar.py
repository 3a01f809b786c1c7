"""A grammar backend without a library behind it: one of some choices, token by token."""

from __future__ import annotations

import json

import numpy as np

from quire.structured_output.capabilities import Capabilities
from quire.structured_output.interface import CompiledGrammar, GrammarSpec, Matcher, StructuredOutputBackend, Vocabulary


class AcmeGrammars(StructuredOutputBackend):
    """Makes grammars of choices alone."""

    quire_contract = 1
    capabilities = Capabilities(module="acme_quire", kinds=frozenset(("choice",)))

    def compile(self, spec: GrammarSpec) -> bytes:
        return spec.text.encode()

    def load(self, spec: GrammarSpec, compiled: bytes) -> CompiledGrammar:
        return Choices([choice.encode() for choice in json.loads(compiled)], self.vocabulary)


class Choices(CompiledGrammar):
    def __init__(self, choices: list[bytes], vocabulary: Vocabulary) -> None:
        self.choices = choices
        self.vocabulary = vocabulary

    def start(self) -> Matcher:
        return Choice(self)


class Choice(Matcher):
    def __init__(self, grammar: Choices) -> None:
        self._grammar = grammar
        self._token_ids: list[int] = []

    def _allowed(self) -> list[int]:
        vocabulary, choices = self._grammar.vocabulary, self._grammar.choices
        text = b"".join(vocabulary.pieces[one] for one in self._token_ids)
        rests = [choice[len(text) :] for choice in choices if choice.startswith(text)]
        ids = [
            one
            for one, piece in enumerate(vocabulary.pieces)
            if piece and any(rest.startswith(piece) for rest in rests)
        ]
        return [*ids, vocabulary.eos_token_id] if b"" in rests else ids

    def accept(self, token_id: int) -> bool:
        if self.is_terminated() or token_id not in self._allowed():
            return False
        self._token_ids.append(token_id)
        return True

    def rollback(self, num_tokens: int) -> None:
        del self._token_ids[len(self._token_ids) - num_tokens :]

    def fill_bitmask(self, bitmask: np.ndarray, row: int) -> None:
        bitmask[row] = 0
        for one in self._allowed():
            bitmask[row, one // 32] |= np.uint32(1 << one % 32).view(np.int32)

    def is_terminated(self) -> bool:
        return self._token_ids[-1:] == [self._grammar.vocabulary.eos_token_id]
