"""How many drafts a step verifies, and which: one budget over all rows, for the most expected tokens per second.

Called by the draft controller. Functions without state. With n rows that decode, and the B drafts that are most likely
to stand, a step is expected to give n + (sum of their chances) tokens in cost(B) seconds; B is where that is largest,
and 0 unless it is better by MIN_GAIN. Chances never rise within a row, so the best B drafts are a prefix of each row's.

Only some numbers are considered, as each takes time and its cost is to be learned: small ones, those with which the
step has a common size, where costs may have steps, and all that there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import numpy as np

# What drafts must promise to be verified: errors of the estimates must not eat the gain.
MIN_GAIN = 1.03
# What another number of drafts than that of the step before must promise: a step of the same size finds more of what
# it needs in the caches.
MIN_SWITCH = 1.1
# Numbers of drafts that are always considered; and sizes of steps: in each doubling beyond it those of so many eighths.
ALWAYS_CONSIDERED = 8
COMMON_EIGHTHS = (8, 10, 12)


class DraftBudget(NamedTuple):
    """What was chosen.

    Attributes:
        num_drafts: to verify, of all rows together.
        gain: expected tokens per second over those of the step without drafts; the best there was, whether taken or
            not; 1 = there is no better than none.
    """

    num_drafts: int
    gain: float


@lru_cache(maxsize=4096)
def common_budgets(num_decoding: int, most: int) -> tuple[int, ...]:
    """Numbers of drafts of a step of so many rows that are considered, at least 1 and at most `most`; rising."""
    return tuple(
        number for number in range(1, most + 1)
        if number <= ALWAYS_CONSIDERED or number == most or _is_common(num_decoding + number)
    )  # fmt: skip


def _is_common(num_tokens: int) -> bool:
    """Whether steps of so many tokens, more than ALWAYS_CONSIDERED, have a common size."""
    shift = num_tokens.bit_length() - 4
    return num_tokens >> shift in COMMON_EIGHTHS and num_tokens & ((1 << shift) - 1) == 0


def best_budget(
    chances: Sequence[float] | np.ndarray,
    num_decoding: int,
    numbers: Sequence[int],
    seconds: Sequence[float],
    newest: int = 0,
) -> DraftBudget:
    """The best of some numbers of drafts, of those that are likeliest to stand.

    Args:
        chances: [num_drafts] that each stands, together with all before it in its row; falling.
        num_decoding: tokens that the step gives without any, at least 1.
        numbers: of drafts, at least 1 and at most `num_drafts` each.
        seconds: of the step with none, then with each of `numbers`; positive.
        newest: number that the step before had, if any: another one must be better by MIN_SWITCH.
    """
    expected = np.cumsum(chances).tolist() if isinstance(chances, np.ndarray) else list(accumulate(chances))
    best, best_rate, best_weighed = 0, 0.0, 0.0
    for number, step_s in zip(numbers, seconds[1:], strict=True):
        rate = (num_decoding + expected[number - 1]) / step_s
        weighed = MIN_SWITCH * rate if number == newest else rate
        if weighed > best_weighed:
            best, best_rate, best_weighed = number, rate, weighed
    gain = best_rate * seconds[0] / num_decoding
    return DraftBudget(best if gain > MIN_GAIN else 0, max(gain, 1.0))


def rank_drafts(chances: np.ndarray) -> np.ndarray:
    """[num_drafts] intp; the drafts from the likeliest to the least likely, in each row the first ones first."""
    return np.argsort(-chances, kind="stable")


def rank_few(chances: Sequence[float]) -> list[int]:
    """`rank_drafts` of a few."""
    return sorted(range(len(chances)), key=lambda number: -chances[number])


def counts_of(chosen: np.ndarray | list[int], counts: np.ndarray) -> np.ndarray:
    """[num_rows] int32; how many drafts each row has among `chosen`.

    Args:
        chosen: the first ones of `rank_drafts`.
        counts: [num_rows] drafts of each row in all.
    """
    if len(counts) == 1:
        return np.array([len(chosen)], dtype=np.int32)
    rows = np.repeat(np.arange(len(counts)), counts)
    return np.bincount(rows[chosen], minlength=len(counts)).astype(np.int32)
