"""How many tokens a step may hold, and how many of them one request may have.

`StepBudget` is made anew for every step. Token caps are pure functions: a feature that wants fewer tokens of
some requests in a step adds one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from quire.core.request import Request
from quire.kv_cache.manager import KVCacheManager


class StepBudget:
    """Tokens left in this step, for all requests."""

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


def share_prompt_tokens(
    num_wanted: np.ndarray, is_prefill: np.ndarray, prompts: StepBudget, order: np.ndarray | None = None
) -> np.ndarray:
    """What rows that want `num_wanted` ([num_reqs]) tokens may compute when all their prompts share a budget.

    A row that decodes gets its token; the others spend `prompts` one after the other.

    Args:
        is_prefill: [num_reqs] bool.
        order: [num_reqs] which entry is first, second, ...; None = as they are given.
    """
    wanted = np.where(is_prefill, num_wanted, 0)
    if order is None:
        granted = prompts.take_in_order(wanted)
    else:
        granted = np.empty_like(wanted)
        granted[order] = prompts.take_in_order(wanted[order])
    return np.where(is_prefill, granted, num_wanted)


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedTokens:
    """The tokens that requests would compute next, running ones or one that waits.

    Attributes:
        num_tokens: [num_reqs] how many.
        starts: [num_reqs] position of the first of them.
        request_of: the request of an entry.
        num_unfinished: requests that run or wait.
    """

    num_tokens: np.ndarray
    starts: np.ndarray
    request_of: Callable[[int], Request]
    num_unfinished: int


class TokenCap(Protocol):
    """Bounds what each request may compute in this step.

    A cap that stops before position `p` of some prompts, where an image is not encoded yet:

        for i in np.flatnonzero(wanted.num_tokens > 1):
            if (p := position_of_image(wanted.request_of(i))) > wanted.starts[i]:
                num_tokens[i] = min(num_tokens[i], p - wanted.starts[i])
    """

    def __call__(self, wanted: WantedTokens) -> np.ndarray:
        """[num_reqs] at most `wanted.num_tokens`, which is not to be written, and at least 1 where that is."""


def apply_caps(caps: Sequence[TokenCap], wanted: WantedTokens) -> np.ndarray:
    """[num_reqs] what is left of the tokens wanted after every cap."""
    for cap in caps:
        wanted = replace(wanted, num_tokens=cap(wanted))
    return wanted.num_tokens


def cap_long_prefill(threshold: int) -> TokenCap:
    """No request computes more than `threshold` tokens in a step while others want to run."""

    def cap(wanted: WantedTokens) -> np.ndarray:
        return np.minimum(wanted.num_tokens, threshold) if wanted.num_unfinished > 1 else wanted.num_tokens

    return cap


def cap_at_checkpoints(kv: KVCacheManager) -> TokenCap:
    """A prompt is cut where its recurrent state is to be kept. The first of the caps, as it needs all of the tokens."""

    def cap(wanted: WantedTokens) -> np.ndarray:
        prompts = np.flatnonzero(wanted.num_tokens > 1)
        if not len(prompts):
            return wanted.num_tokens
        num_tokens = np.array(wanted.num_tokens)
        for i in prompts.tolist():
            start = int(wanted.starts[i])
            border = kv.next_checkpoint(wanted.request_of(i), start, start + int(num_tokens[i]))
            num_tokens[i] = border - start
        return num_tokens

    return cap
