"""How many drafts a step verifies, and which: one budget over all rows, for the most expected tokens per second.

Called by the draft controller. Functions without state. With n rows that decode, and the B drafts that are most likely
to stand, a step is expected to give n + (sum of their chances) tokens in cost(B) seconds; B is where that is largest,
and 0 unless it is better by MIN_GAIN. Chances never rise within a row, so the best B drafts are a prefix of each row's.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

# What drafts must promise to be verified: errors of the estimates must not eat the gain.
MIN_GAIN = 1.03


class DraftBudget(NamedTuple):
    """What was chosen.

    Attributes:
        num_drafts: to verify, of all rows together.
        gain: expected tokens per second over those of the step without drafts; the best there was, whether taken or
            not; 1 = there is no better than none.
    """

    num_drafts: int
    gain: float


def best_budget(chances: np.ndarray, num_decoding: int, seconds: np.ndarray) -> DraftBudget:
    """The best number of drafts, of those that are likeliest to stand.

    Args:
        chances: [num_drafts] that each stands, together with all before it in its row; falling.
        num_decoding: tokens that the step gives without any, at least 1.
        seconds: [num_drafts + 1] of the step with 0, 1, ... drafts; positive.
    """
    if not len(chances):
        return DraftBudget(0, 1.0)
    rates = (num_decoding + np.cumsum(chances)) / seconds[1:]
    best = int(np.argmax(rates))
    gain = float(rates[best] * seconds[0] / num_decoding)
    return DraftBudget(best + 1 if gain > MIN_GAIN else 0, max(gain, 1.0))


def rank_drafts(chances: np.ndarray) -> np.ndarray:
    """[num_drafts] intp; the drafts from the likeliest to the least likely, in each row the first ones first."""
    return np.argsort(-chances, kind="stable")


def counts_of(chosen: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """[num_rows] int32; how many drafts each row has among `chosen`.

    Args:
        chosen: the first ones of `rank_drafts`.
        counts: [num_rows] drafts of each row in all.
    """
    rows = np.repeat(np.arange(len(counts)), counts)
    return np.bincount(rows[chosen], minlength=len(counts)).astype(np.int32)
