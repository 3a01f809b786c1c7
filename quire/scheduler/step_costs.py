"""What steps have cost so far, and how many prompt tokens a step may therefore hold beside decoding requests.

Called by the scheduler. Owns the measurements. A step of d decoding requests and p prompt tokens is taken to last
decode_only(d) + p * prompt_token; both are medians of the newest measurements, so one slow step changes nothing. Times
decide only how a prompt is cut, which no request's tokens depend on.

The bound is a multiple of what a step will last once every request that is there decodes. Were it a multiple of the
step as it is, the first of a burst of requests would hold up all others: beside one cheap step hardly a prompt fits.
"""

from __future__ import annotations

import math
from collections import deque

import numpy as np

from quire.core.scheduler_output import SchedulerOutput

# Prompt tokens of a step that are allowed whatever they cost: prompts must get on.
MIN_PROMPT_TOKENS = 8
# Of the time that prompt tokens may add, the part that is planned with; the rest is for estimates that are off.
PLANNED_SHARE = 0.8
# Steps beside prompts after which one without is worth its price: it says what decoding alone costs by then.
MAX_STEPS_BESIDE = 64
# Measurements whose median counts: many of decode-only steps, which change little; few of prompts, whose cost grows
# with what they have behind them.
NUM_DECODE_ONLY_KEPT = 33
NUM_PROMPTS_KEPT = 5


def max_prompt_tokens(decode_only_s: float, longest_s: float, prompt_token_s: float) -> float:
    """Prompt tokens with which a step stays under `longest_s`; not above 0 when it does not without them.

    Args:
        decode_only_s: seconds of the step without them.
        prompt_token_s: seconds that each of them adds; 0 or less = nothing that could be measured.
    """
    if prompt_token_s <= 0:
        return float("inf")
    return PLANNED_SHARE * (longest_s - decode_only_s) / prompt_token_s


def make_step_costs(max_slowdown: float | None, max_step_s: float | None) -> StepCosts | None:
    """The costs that these bounds need; None = there is no bound."""
    if max_slowdown is None and max_step_s is None:
        return None
    return StepCosts(max_slowdown or math.inf, max_step_s or math.inf)


class StepCosts:
    """Measured steps, and the bound that follows from them.

    Args:
        max_slowdown: most times the duration of a step that decodes all requests which a step with prompt tokens in it
            may take; at least 1.
        max_step_s: most seconds that a step with prompt tokens beside decoding requests may take. Where decoding alone
            takes as long, prompts get MIN_PROMPT_TOKENS a step.
    """

    def __init__(self, max_slowdown: float, max_step_s: float = math.inf) -> None:
        self._max_slowdown = max_slowdown
        self._max_step_s = max_step_s
        self._decode_only_s: dict[int, deque[float]] = {}
        self._prompt_token_s: deque[float] = deque(maxlen=NUM_PROMPTS_KEPT)
        self._num_beside = MAX_STEPS_BESIDE  # steps beside prompts since the last decode-only one
        self._most_granted = MIN_PROMPT_TOKENS // 2

    def prompt_tokens_beside(self, num_decoding: int, num_requests: int = 0, num_fair: int = 0) -> int:
        """Prompt tokens that the next step may hold beside `num_decoding` >= 1 requests that make a token each.

        Args:
            num_requests: that will decode at once when their prompts are done, these included.
            num_fair: where several tenants compute: the requests of the step of which the bound is a multiple.

        0 asks for a decode-only step, to measure it; never twice in a row. Otherwise at least MIN_PROMPT_TOKENS, at
        most twice what was tried lately.
        """
        if self._num_beside >= MAX_STEPS_BESIDE:
            return 0
        decode_only_s = self._estimate_decode_only_s(num_decoding)
        if decode_only_s is None or not self._prompt_token_s:
            return MIN_PROMPT_TOKENS
        if num_fair:
            full_s = self._estimate_decode_only_s(num_fair) or decode_only_s
        else:
            full_s = max(decode_only_s, self._estimate_full_s(num_requests, num_decoding, decode_only_s))
        longest_s = self._max_step_s
        if self._max_slowdown < math.inf:
            longest_s = min(longest_s, self._max_slowdown * full_s)
        allowed = max_prompt_tokens(decode_only_s, longest_s, _upper_median(self._prompt_token_s))
        return max(MIN_PROMPT_TOKENS, int(min(allowed, 2 * self._most_granted)))

    def most_decoding(self, num_fair: int, num_wanting: int) -> int:
        """How many of `num_wanting` requests may decode at once where a step of `num_fair` is a fair one.

        Such a step is made longer by half of what the bound allows; the other half is for prompts. Sizes that were not
        measured yet are allowed: then they are.
        """
        fair_s = self._estimate_decode_only_s(num_fair)
        if fair_s is None or self._max_slowdown == math.inf or num_wanting <= num_fair:
            return max(num_fair, num_wanting)
        longest_s = (1 + self._max_slowdown) / 2 * fair_s
        size, size_s = num_fair, fair_s
        for larger in sorted(one for one in self._decode_only_s if num_fair < one <= num_wanting):
            larger_s = _lower_median(self._decode_only_s[larger])
            if larger_s > longest_s:
                return size + int((larger - size) * max(0.0, longest_s - size_s) / (larger_s - size_s))
            size, size_s = larger, larger_s
        return num_wanting

    def record_step(self, scheduled: SchedulerOutput, seconds: float | None) -> None:
        """Take in a step that was executed in so many seconds; None = not measured."""
        num_rows = len(scheduled.rows)
        if scheduled.total_num_scheduled_tokens == num_rows:  # a token each
            self.record(num_rows, 0, seconds)
            return
        is_chunk = scheduled.is_chunk()
        num_chunk_tokens = int(scheduled.num_scheduled_tokens[is_chunk].sum())
        self.record(num_rows - int(np.count_nonzero(is_chunk)), num_chunk_tokens, seconds)

    def record(self, num_decoding: int, num_prompt_tokens: int, seconds: float | None) -> None:
        """Take in a step: what it held, and how long it took; None = not measured.

        Steps of prompts alone say nothing here.
        """
        if not num_decoding:
            return
        if not num_prompt_tokens:
            self._record_decode_only(num_decoding, seconds)
            return
        self._num_beside += 1
        if seconds is not None:
            self._record_beside(num_decoding, num_prompt_tokens, seconds)

    def _record_decode_only(self, num_decoding: int, seconds: float | None) -> None:
        is_first = self._num_beside >= MAX_STEPS_BESIDE
        self._num_beside = 0
        if seconds is None:
            return
        kept = self._decode_only_s.setdefault(_size_class(num_decoding), deque(maxlen=NUM_DECODE_ONLY_KEPT))
        if is_first:
            kept.clear()  # contexts have grown since
        kept.append(seconds)

    def _record_beside(self, num_decoding: int, num_prompt_tokens: int, seconds: float) -> None:
        decode_only_s = self._estimate_decode_only_s(num_decoding)
        if decode_only_s is None:
            return
        if seconds < decode_only_s:  # decoding alone cannot take longer than this
            decode_only_s = seconds
            self._decode_only_s[_size_class(num_decoding)] = deque([seconds], maxlen=NUM_DECODE_ONLY_KEPT)
        if num_prompt_tokens >= MIN_PROMPT_TOKENS:  # fewer say more of the clock than of their price
            self._prompt_token_s.append((seconds - decode_only_s) / num_prompt_tokens)
            self._most_granted = max(num_prompt_tokens, self._most_granted // 2)

    def _estimate_decode_only_s(self, num_decoding: int) -> float | None:
        """Seconds of a step of this many requests alone, rather too few than too many; None = nothing was measured."""
        size = _size_class(num_decoding)
        kept = self._decode_only_s.get(size)
        if kept:
            return _lower_median(kept)
        if not self._decode_only_s:
            return None
        smaller = [measured for measured in self._decode_only_s if measured < size]
        nearest = max(smaller) if smaller else min(self._decode_only_s)
        return _lower_median(self._decode_only_s[nearest]) * min(1.0, size / nearest)

    def _estimate_full_s(self, num_requests: int, num_decoding: int, decode_only_s: float) -> float:
        """Seconds of a step of `num_requests`, rather too few: to decode a token costs no less than a prompt's."""
        kept = self._decode_only_s.get(_size_class(num_requests))
        if kept:
            return _lower_median(kept)
        return decode_only_s + (num_requests - num_decoding) * max(0.0, _lower_median(self._prompt_token_s))


def _size_class(num_decoding: int) -> int:
    """The number with all but its leading three binary digits dropped: classes at most a quarter wide."""
    shift = max(0, num_decoding.bit_length() - 3)
    return num_decoding >> shift << shift


def _lower_median(values: deque[float]) -> float:
    return sorted(values)[(len(values) - 1) // 2]


def _upper_median(values: deque[float]) -> float:
    return sorted(values)[len(values) // 2]
