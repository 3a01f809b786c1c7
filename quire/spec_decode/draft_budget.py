"""How many drafts a step verifies, and which: one budget over all rows, for the most tokens per second.

Called by the draft controller. Functions without state. A row is expected to get 1 + (sum of its drafts' chances)
tokens from a step of cost(B) seconds. What counts is the geometric mean of that over all rows (proportional fairness;
Kelly, Maulloo and Tan 1998): with the mean of tokens fifteen rows would wait for the drafts of one, and a batch is done
when its slowest row is. Of one row both are the same. So a draft is worth what it adds to the logarithm of its row's
tokens; B is where the sum of the B largest worths over the number of rows, less the logarithm of cost(B), is largest,
and 0 unless the gain is MIN_GAIN. Worths fall within a row, so the best B drafts are a prefix of each row's.

Only some numbers are considered, as each takes time and its cost is to be learned: small ones, those with which the
step has a common size, where costs may have steps, and all that there are.
"""

from __future__ import annotations

import math
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
        gain: expected tokens per second over those of the step without drafts, the geometric mean over all rows; the
            best there was, whether taken or not; 1 = there is no better than none.
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


def worths_of(chances: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """[num_drafts] what each draft adds to the logarithm of the expected tokens of its row; falling within a row.

    Args:
        chances: [num_drafts] that each stands, together with all before it in its row.
        counts: [num_rows] drafts of each row.
    """
    sums = np.cumsum(chances)
    starts = np.cumsum(counts) - counts
    of_rows = np.repeat(np.concatenate(([0.0], sums))[starts], counts)  # the sum before each row
    found: np.ndarray = np.log1p(chances / (1.0 + sums - chances - of_rows))
    return found


def worths_of_few(chances: Sequence[float], counts: Sequence[int]) -> list[float]:
    """`worths_of`, draft by draft."""
    found, at = list[float](), 0
    for count in counts:
        expected = 1.0
        for chance in chances[at : at + count]:
            found.append(math.log1p(chance / expected))
            expected += chance
        at += count
    return found


def best_budget(
    worths: Sequence[float] | np.ndarray,
    num_decoding: int,
    numbers: Sequence[int],
    seconds: Sequence[float],
    newest: int = 0,
) -> DraftBudget:
    """The best of some numbers of drafts, of those that are worth most.

    Args:
        worths: [num_drafts] of each; falling.
        num_decoding: rows that decode, those without drafts included; at least 1.
        numbers: of drafts, at least 1 and at most `num_drafts` each.
        seconds: of the step with none, then with each of `numbers`; positive.
        newest: number that the step before had, if any: another one must be better by MIN_SWITCH.
    """
    sums = np.cumsum(worths).tolist() if isinstance(worths, np.ndarray) else list(accumulate(worths))
    best, best_rate, best_weighed = 0, 0.0, 0.0
    for number, step_s in zip(numbers, seconds[1:], strict=True):
        rate = math.exp(sums[number - 1] / num_decoding) / step_s
        weighed = MIN_SWITCH * rate if number == newest else rate
        if weighed > best_weighed:
            best, best_rate, best_weighed = number, rate, weighed
    gain = best_rate * seconds[0]
    return DraftBudget(best if gain > MIN_GAIN else 0, max(gain, 1.0))


def rank_drafts(worths: np.ndarray) -> np.ndarray:
    """[num_drafts] intp; drafts, the one worth most first, in each row the first ones first."""
    return np.argsort(-worths, kind="stable")


def rank_few(worths: Sequence[float]) -> list[int]:
    """`rank_drafts` of a few."""
    return sorted(range(len(worths)), key=lambda number: -worths[number])


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
