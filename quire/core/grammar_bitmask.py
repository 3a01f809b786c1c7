"""Which tokens the grammars of a step allow: made by the engine core, applied to logits by the worker.

A row of a bitmask is [ceil(vocab_size / 32)] int32; bit j of word i is token 32 * i + j, and a 0 makes the token
impossible. The functions here are the only place that knows it, besides the kernel that applies it. No state.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class GrammarBitmask:
    """Masks of the rows of logits whose requests have a grammar.

    Attributes:
        lines: [n] int32, distinct; which of the step's rows of logits, of which a row with drafts has several.
        bitmask: [n, ceil(vocab_size / 32)] int32.
        closed: [m] int32, distinct; rows of logits behind drafts that a grammar does not take, or cannot be taken
            through: nothing is sampled there. None = there are none.
    """

    lines: np.ndarray
    bitmask: np.ndarray
    closed: np.ndarray | None = None


def pack_mask(is_allowed: np.ndarray) -> np.ndarray:
    """[..., 32 * n] bool as [..., n] int32."""
    return np.packbits(is_allowed, axis=-1, bitorder="little").view(np.int32)


def unpack_mask(bitmask: np.ndarray, vocab_size: int) -> np.ndarray:
    """[..., vocab_size] bool of [..., n] int32 (contiguous)."""
    bits = np.unpackbits(bitmask.view(np.uint8), axis=-1, bitorder="little")
    return bits[..., :vocab_size].view(np.bool_)


def mask_of(token_ids: Collection[int], vocab_size: int) -> np.ndarray:
    """[ceil(vocab_size / 32)] int32 that allows these tokens; ids outside the vocabulary are left out."""
    is_allowed = np.zeros(-(-vocab_size // 32) * 32, dtype=np.bool_)
    ids = np.fromiter(token_ids, dtype=np.int64, count=len(token_ids))
    is_allowed[ids[(ids >= 0) & (ids < vocab_size)]] = True
    return pack_mask(is_allowed)


def allows(row: np.ndarray, token_id: int) -> bool:
    """Whether a row allows a token."""
    return bool(int(row[token_id >> 5]) >> (token_id & 31) & 1)


def allow(row: np.ndarray, token_ids: Iterable[int]) -> None:
    """Make a few tokens of a row possible, in place."""
    words = row.view(np.uint32)
    for token_id in token_ids:
        words[token_id >> 5] |= np.uint32(1 << (token_id & 31))


def allow_only(row: np.ndarray, token_id: int) -> None:
    """Make all tokens of a row but one impossible, in place."""
    row[:] = 0
    allow(row, (token_id,))
