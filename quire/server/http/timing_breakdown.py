"""Where a request's wall time went: phases that follow one another without a gap. No state.

Used for answers and traces. The lifecycle events come with the outputs; all times are of the machine's one monotonic
clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from quire.core.stats import RequestStateStats

PHASES = ("prepare", "queued", "prefill", "decode", "detokenize", "deliver")
"""Until the engine has it; until its turn; until the first token; until the last; until its text; until it is sent."""


@dataclass(frozen=True, slots=True)
class TimingBreakdown:
    """The phases of one request, in microseconds, so that they add up exactly.

    Attributes:
        ends_us: end of each phase after the receipt, ascending; the last is the whole time.
        stats: what the engine said of it.
        num_cached_tokens, num_new_tokens: of its prompts and its answers.
    """

    ends_us: tuple[int, ...]
    stats: RequestStateStats
    num_cached_tokens: int = 0
    num_new_tokens: int = 0

    @property
    def durations_us(self) -> dict[str, int]:
        """Phase -> how long it took."""
        starts = (0, *self.ends_us)
        return {name: end - start for name, start, end in zip(PHASES, starts, self.ends_us, strict=False)}

    def content(self) -> dict[str, Any]:
        """The `metrics` object of an answer: times in milliseconds."""
        durations = self.durations_us
        first_token_us = self.ends_us[PHASES.index("prefill")]
        decode_us, num_intervals = durations["decode"], self.num_new_tokens - 1
        rate = (num_intervals, decode_us) if num_intervals > 0 else (self.num_new_tokens, durations["prefill"])
        return {
            **{f"{name}_ms": us / 1e3 for name, us in durations.items()},
            "total_ms": self.ends_us[-1] / 1e3,
            "time_to_first_token_ms": first_token_us / 1e3,
            "queue_time_ms": durations["queued"] / 1e3,
            "generation_time_ms": decode_us / 1e3,
            **({"mean_itl_ms": round(decode_us / num_intervals / 1e3, 3)} if num_intervals > 0 else {}),
            "tokens_per_second": round(1e6 * rate[0] / rate[1], 3) if rate[1] else 0.0,
            "cached_tokens": self.num_cached_tokens,
            "preemptions": self.stats.num_preemptions,
            "restarts": self.stats.num_restarts,
        }


def make_receipt(
    received_s: float, stats: RequestStateStats, now_s: float, num_cached_tokens: int = 0, num_new_tokens: int = 0
) -> TimingBreakdown:
    """The receipt of a request that ends now; a phase that it did not reach has no length.

    Args:
        received_s, now_s: monotonic clock.
        stats: of its engine requests together; lifecycle events that did not come are 0.
    """
    points = [stats.queued_ts, stats.scheduled_ts, stats.first_token_ts, stats.last_token_ts, stats.output_ts]
    while points and not points[-1]:
        points.pop()
    ends, latest = [], received_s
    for point in points:
        latest = min(now_s, max(latest, point))
        ends.append(latest)
    ends += [now_s] * (len(PHASES) - len(ends))
    return TimingBreakdown(
        tuple(round(1e6 * (end - received_s)) for end in ends), stats, num_cached_tokens, num_new_tokens
    )  # fmt: skip
