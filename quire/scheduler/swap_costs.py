"""What swaps and recomputed tokens have cost so far, and which of the two is cheaper for a victim.

Called by `Swapping`. Owns the measurements: the newest of each size, of which the median of those nearest counts, so
that one slow step changes nothing. A size that was never tried is tried by a swap: what it costs is known afterwards.
"""

from __future__ import annotations

import math
from collections import deque

import numpy as np

from quire.core.runner_output import ModelRunnerOutput
from quire.core.scheduler_output import SchedulerOutput

# Measurements that are kept of each octave of sizes, and of which the median counts.
NUM_KEPT = 9
NUM_NEAREST = 5
# Copies of fewer or more blocks than this factor away say nothing: small ones cost what starting them costs.
LIKE_SIZES = 2.0
# Copies of like size after which their median counts; the first ones also pay for memory that was never touched.
MIN_COPIES = 3
# Prompt tokens of a step from which on it counts: fewer say more of what is beside them than of their price.
MIN_PROMPT_TOKENS = 32


def is_swap_cheaper(swap_s: float | None, recompute_s: float | None) -> bool:
    """Whether a victim's blocks are copied out and back rather than computed again; None = not known.

    What is not known is swapped: a copy of keys and values is nearly always cheaper than the layers that made them,
    and leaves a measurement behind.
    """
    return swap_s is None or recompute_s is None or swap_s < recompute_s


class SwapCosts:
    """Measured copies and prompts."""

    def __init__(self) -> None:
        self._out = Measurements()
        self._in = Measurements()
        self._decode_only = Measurements()
        self._prompt_tokens = Measurements()

    def estimate_swap_s(self, num_out: int, num_in: int) -> float | None:
        """Seconds to copy so many blocks out, and so many back; None when copies of like size are unmeasured."""
        out_s, in_s = _estimate_copy_s(self._out, num_out), _estimate_copy_s(self._in, num_in)
        return None if out_s is None or in_s is None else out_s + in_s

    def estimate_recompute_s(self, start: int, end: int) -> float | None:
        """Seconds to compute the tokens start .. end - 1 of a request; None when no prompt was measured.

        A token's price grows evenly with what is before it, so that of the middle one counts.
        """
        if end <= start:
            return 0.0
        per_token_s = self._prompt_tokens.estimate((start + end) / 2)
        return None if per_token_s is None else (end - start) * per_token_s

    def record(self, scheduled: SchedulerOutput, output: ModelRunnerOutput, seconds: float | None) -> None:
        """Take in an executed step: its copies, and what its prompts added to it."""
        for copies, copy_s, kept in (
            (scheduled.swap_outs, output.swap_out_s, self._out),
            (scheduled.swap_ins, output.swap_in_s, self._in),
        ):
            if len(copies) and copy_s is not None:
                kept.record(len(copies), copy_s / len(copies))
                seconds = None if seconds is None else seconds - copy_s
        if seconds is None:
            return
        num_tokens = scheduled.num_scheduled_tokens
        is_prompt = scheduled.is_chunk()
        num_prompt_tokens = int(num_tokens[is_prompt].sum())
        if not num_prompt_tokens:
            self._decode_only.record(len(num_tokens), seconds)
            return
        if num_prompt_tokens < MIN_PROMPT_TOKENS:
            return
        decode_only_s = (
            self._decode_only.estimate(len(num_tokens)) or 0.0
        )  # with its blocks, a prompt's row would decode
        middles = scheduled.num_computed_tokens[is_prompt] + num_tokens[is_prompt] / 2
        middle = float(np.average(middles, weights=num_tokens[is_prompt]))
        self._prompt_tokens.record(middle, max(0.0, seconds - decode_only_s) / num_prompt_tokens)


class Measurements:
    """The newest (size, seconds) of each octave of sizes, which are positive: frequent ones do not push out others."""

    def __init__(self) -> None:
        self._by_octave: dict[int, deque[tuple[float, float]]] = {}

    def record(self, size: float, seconds: float) -> None:
        """Take in one measurement."""
        place = math.log2(size)
        self._by_octave.setdefault(math.floor(place), deque(maxlen=NUM_KEPT)).append((place, seconds))

    def estimate(self, size: float, *, within: float = math.inf, at_least: int = 1) -> float | None:
        """Median of the measurements nearest to `size`; None when fewer than `at_least` are within that factor."""
        place = math.log2(size)
        near = sorted((abs(where - place), seconds) for kept in self._by_octave.values() for where, seconds in kept)
        like = sorted(seconds for distance, seconds in near[:NUM_NEAREST] if distance <= math.log2(within))
        return like[len(like) // 2] if len(like) >= at_least else None


def _estimate_copy_s(per_page: Measurements, num_blocks: int) -> float | None:
    if not num_blocks:
        return 0.0
    page_s = per_page.estimate(num_blocks, within=LIKE_SIZES, at_least=MIN_COPIES)
    return None if page_s is None else page_s * num_blocks
