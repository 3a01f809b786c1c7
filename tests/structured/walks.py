"""Answers written by chance within a grammar: whatever its mask allows, each token as likely as any other."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import numpy as np

from quire.structured_output.interface import CompiledGrammar, Vocabulary


def allowed(line: np.ndarray, vocab_size: int) -> np.ndarray:
    """The ids that a mask allows."""
    bits = np.unpackbits(line.view(np.uint8), bitorder="little")[:vocab_size]
    return np.flatnonzero(bits)


def walk(grammar: CompiledGrammar, vocabulary: Vocabulary, rng: random.Random, max_tokens: int) -> list[int] | None:
    """The tokens of an answer, its end left out; None when it has not ended within `max_tokens`."""
    state = grammar.start()
    line = np.empty((1, vocabulary.bitmask_size), dtype=np.int32)
    tokens: list[int] = []
    for _ in range(max_tokens):
        state.fill_bitmask(line, 0)
        token_id = int(rng.choice(allowed(line[0], vocabulary.vocab_size).tolist()))
        assert state.accept(token_id), "what a mask allows is accepted"
        if token_id == vocabulary.eos_token_id:
            return tokens
        tokens.append(token_id)
    return None


def text_of(tokens: Sequence[int], vocabulary: Vocabulary) -> str:
    """Their text as the detokenizer makes it, special tokens shown."""
    special: Mapping[int, bytes] = vocabulary.special_pieces
    return b"".join(vocabulary.pieces[one] or special.get(one, b"") for one in tokens).decode("utf-8", "replace")
