"""Reference: which drafts of one sequence stand, in float64 and in the papers' words. Randomness is a callable.

Leviathan, Kalman, Matias 2023, "Fast inference from transformers via speculative decoding", algorithm 1; Sun et al.
2024, "Block verification accelerates speculative decoding", algorithm 2; Cai et al. 2024, "Medusa", section 2.3.1.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

Uniform = Callable[[], float]
"""The next number in [0, 1)."""


def standard(p: np.ndarray, q: np.ndarray, drafts: list[int], uniform: Uniform) -> list[int]:
    """The tokens of a step with gamma drafts: those that stand, and one more.

    Args:
        p: [gamma + 1, vocab_size]; of the target behind 0, 1 .. gamma drafts.
        q: [gamma, vocab_size]; what each draft was drawn from.
    """
    tokens: list[int] = []
    for i, draft in enumerate(drafts):
        if uniform() >= min(1.0, p[i, draft] / q[i, draft]):
            return [*tokens, draw(np.maximum(p[i] - q[i], 0.0), uniform)]
        tokens.append(draft)
    return [*tokens, draw(p[-1], uniform)]


def block(p: np.ndarray, q: np.ndarray, drafts: list[int], uniform: Uniform) -> list[int]:
    """As `standard`; the drafts are judged together."""
    gamma, tau = len(drafts), 0
    scales = [1.0]
    for i, draft in enumerate(drafts, start=1):
        scales.append(min(scales[-1] * p[i - 1, draft] / q[i - 1, draft], 1.0))
        chance = scales[i]
        if i < gamma:
            mass = np.maximum(scales[i] * p[i] - q[i], 0.0).sum()
            chance = mass / (mass + 1.0 - scales[i]) if mass else 0.0
        if uniform() < chance:
            tau = i
    last = p[-1] if tau == gamma else np.maximum(scales[tau] * p[tau] - q[tau], 0.0)
    return [*drafts[:tau], draw(last, uniform)]


def is_typical(p: np.ndarray, draft: int, threshold: float, alpha: float) -> bool:
    """Whether a draft stands by typical acceptance, from p [vocab_size] of its place."""
    entropy = -sum(x * math.log(x) for x in p.tolist() if x > 0)
    return bool(p[draft] > min(threshold, alpha * math.exp(-entropy)))


def draw(weights: np.ndarray, uniform: Uniform) -> int:
    """A token, by weights [vocab_size] that need not sum to 1."""
    cumulative = weights.cumsum()
    return int(np.searchsorted(cumulative, uniform() * cumulative[-1], side="right"))
