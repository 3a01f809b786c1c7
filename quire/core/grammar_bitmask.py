"""Which tokens the grammars of a step allow: made by the engine core, applied to logits by the worker."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class GrammarBitmask:
    """Masks of the rows that have a grammar.

    Attributes:
        lines: [n] int32, distinct; positions among the rows that sample in this step.
        bitmask: [n, ceil(vocab_size / 32)] int32; bit j of word i is id 32 * i + j; a 0 makes the token impossible.
    """

    lines: np.ndarray
    bitmask: np.ndarray
