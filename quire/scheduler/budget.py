"""How many tokens a step may hold, and how many of them one request may have.

`StepBudget` is made anew for every step. Token caps are pure functions: a feature that wants fewer tokens of
some requests in a step adds one.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np


class StepBudget:
    """Tokens left in this step, whoever computes them."""

    def __init__(self, num_tokens: int) -> None:
        self.num_left = num_tokens

    def take(self, num_tokens: int) -> None:
        """Spend tokens; they must be left."""
        assert num_tokens <= self.num_left, "scheduled over budget"
        self.num_left -= num_tokens

    def refund(self, num_tokens: int) -> None:
        """Give back tokens that were spent in this step."""
        self.num_left += num_tokens

    def take_in_order(self, num_wanted: np.ndarray) -> np.ndarray:
        """Spend on requests in the given order until nothing is left; what each one gets, [num_reqs]."""
        total = int(num_wanted.sum())
        if total <= self.num_left:
            self.take(total)
            return num_wanted
        num_before = np.cumsum(num_wanted) - num_wanted
        granted: np.ndarray = np.clip(self.num_left - num_before, 0, num_wanted)
        self.take(int(granted.sum()))
        return granted


def share_prompt_tokens(num_wanted: np.ndarray, prompts: StepBudget, order: np.ndarray | None = None) -> np.ndarray:
    """What rows that want `num_wanted` ([num_reqs]) tokens may compute when all their prompts share a budget.

    A row that wants one token decodes, and gets it; the others spend `prompts` one after the other.

    Args:
        order: [num_reqs] which entry is first, second, ...; None = as they are given.
    """
    is_decoding = num_wanted == 1
    wanted = np.where(is_decoding, 0, num_wanted)
    if order is None:
        granted = prompts.take_in_order(wanted)
    else:
        granted = np.empty_like(wanted)
        granted[order] = prompts.take_in_order(wanted[order])
    granted[is_decoding] = 1
    return granted


class TokenCap(Protocol):
    """Bounds what each request may compute in this step."""

    def __call__(self, num_wanted: np.ndarray, num_unfinished: int) -> np.ndarray:
        """At most `num_wanted` ([num_reqs]), at least 1 where that is; given how many requests run or wait."""


def cap_long_prefill(threshold: int) -> TokenCap:
    """No request computes more than `threshold` tokens in a step while others want to run."""

    def cap(num_wanted: np.ndarray, num_unfinished: int) -> np.ndarray:
        return np.minimum(num_wanted, threshold) if num_unfinished > 1 else num_wanted

    return cap
