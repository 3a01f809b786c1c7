"""WaitEstimate: how long a request would wait for its turn, from what waits before it and how fast tokens are computed.

Told by admission of steps and of ended answers. Owns sums that fade with time, so that it follows the load.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator

from quire.core.stats import SchedulerStats

FADE_S = 15.0
"""Busy seconds after which a step counts for 1/e."""
REMEMBERED_ANSWERS = 128


class WaitEstimate:
    """Tokens to be computed before a turn, over tokens computed a second while there was work."""

    def __init__(self) -> None:
        self._seconds = self._tokens = 0.0
        self._queries = self._hits = 0.0
        self._last_step_s: float | None = None
        self._lengths: deque[float] = deque(maxlen=REMEMBERED_ANSWERS)
        self._total_length = 0.0

    def note_step(self, stats: SchedulerStats, now_s: float) -> None:
        """A step has ended; the time since the one before counts when that one left work."""
        if self._last_step_s is not None:
            seconds = now_s - self._last_step_s
            fade = math.exp(-seconds / FADE_S)
            self._seconds = self._seconds * fade + seconds
            self._tokens = self._tokens * fade + stats.num_scheduled_tokens
            self._queries = self._queries * fade + stats.prefix_cache_queries
            self._hits = self._hits * fade + stats.prefix_cache_hits
        self._last_step_s = now_s if stats.num_running or stats.num_waiting else None

    def note_answers(self, num_tokens: int, num_answers: int) -> None:
        """`num_answers` answers have ended, with `num_tokens` new tokens together."""
        for _ in range(min(num_answers, REMEMBERED_ANSWERS)):
            if len(self._lengths) == REMEMBERED_ANSWERS:
                self._total_length -= self._lengths[0]
            self._lengths.append(num_tokens / num_answers)
            self._total_length += num_tokens / num_answers

    def wait_s(self, waiting: Iterable[tuple[float, float, int | None]]) -> float | None:
        """Seconds until one of the answers that are computed ends after all `waiting` ones had their turn.

        Args:
            waiting: (answers, prompt tokens of them, `max_tokens` of each or None), whatever order.

        Returns:
            None while nothing was measured.
        """
        *_, wait = self.waits_s(waiting)
        return wait

    def waits_s(self, waiting: Iterable[tuple[float, float, int | None]]) -> Iterator[float | None]:
        """As `wait_s`, behind none of `waiting`, behind the first, behind the first two, and so on."""
        if self._tokens <= 0 or self._seconds <= 0:
            yield None
            for _ in waiting:
                yield None
            return
        length = self._total_length / len(self._lengths) if self._lengths else 0.0
        missed = 1.0 - (self._hits / self._queries if self._queries else 0.0)
        pace_s = self._seconds / self._tokens
        num_answers = work = 0.0
        yield length * pace_s
        for count, prompt_tokens, max_tokens in waiting:
            num_answers += count
            work += missed * prompt_tokens + count * (length if max_tokens is None else min(length, max_tokens))
            yield (work + (work / num_answers if num_answers else length)) * pace_s
