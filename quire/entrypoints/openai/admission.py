"""Admission: how much is in the engine, and whether more may come in.

Asked by the routes before a request is given to the engine, told by them when it ends. Owns the counts.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable

from quire.config.server import LimitsConfig
from quire.core.stats import SchedulerStats
from quire.entrypoints.openai.errors import OVERLOADED, UNAVAILABLE, ApiError

MAX_RETRY_AFTER_S = 120
REMEMBERED_ENDS = 64


class Ticket:
    """A request's place in the counts."""

    __slots__ = ("num_answers", "num_tokens")

    def __init__(self, num_answers: int, num_tokens: int) -> None:
        self.num_answers = num_answers
        self.num_tokens = num_tokens


class Admission:
    """Counts answers from admission to their end.

    Args:
        limits: of what may wait.
        max_num_seqs: answers that the engine computes at once.
        on_refusal: told why a request was refused.
        clock: seconds.
    """

    def __init__(
        self,
        limits: LimitsConfig,
        max_num_seqs: int,
        on_refusal: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limits = limits
        self._max_num_seqs = max_num_seqs
        self._on_refusal = on_refusal
        self._clock = clock
        self._stats = SchedulerStats()
        self._ends: deque[float] = deque(maxlen=REMEMBERED_ENDS)
        self.num_answers = 0
        self.num_tokens = 0
        self.is_draining = False

    def note_step(self, stats: SchedulerStats) -> None:
        """Take in the state of the control plane."""
        self._stats = stats

    @property
    def num_queued(self) -> int:
        """Answers that wait: more than the engine computes at once, or than its last step held when others waited."""
        computed = self._stats.num_running if self._stats.num_waiting else self._max_num_seqs
        return max(0, self.num_answers - computed)

    def enter(self, num_answers: int, num_tokens: int) -> Ticket:
        """Count a request in.

        Args:
            num_answers: prompts times n.
            num_tokens: of its prompts.

        Raises:
            ApiError: the server is ending, or too much waits already.
        """
        self.refuse_when_draining()
        queued = self.num_queued
        free = max(0, (self._stats.num_running if self._stats.num_waiting else self._max_num_seqs) - self.num_answers)
        would_queue = max(0, num_answers - free)
        limits = self._limits
        if limits.max_num_queued_reqs is not None and queued + would_queue > limits.max_num_queued_reqs and would_queue:
            raise self._refused("max_num_queued_reqs", queued)
        queued_tokens = self.num_tokens * queued // max(1, self.num_answers)
        if (
            limits.max_num_queued_tokens is not None
            and would_queue
            and queued_tokens + num_tokens > limits.max_num_queued_tokens
        ):
            raise self._refused("max_num_queued_tokens", queued)
        self.num_answers += num_answers
        self.num_tokens += num_tokens
        return Ticket(num_answers, num_tokens)

    def leave(self, ticket: Ticket) -> None:
        """A request has ended; harmless when repeated."""
        self._ends.extend([self._clock()] * min(ticket.num_answers, REMEMBERED_ENDS))
        self.num_answers -= ticket.num_answers
        self.num_tokens -= ticket.num_tokens
        ticket.num_answers = ticket.num_tokens = 0

    def refuse_when_draining(self) -> None:
        """Raise when the server takes no new work."""
        if self.is_draining:
            raise ApiError(UNAVAILABLE, "the server is shutting down", retry_after_s=1)

    def predicted_wait_s(self, num_queued: int) -> int:
        """Seconds until `num_queued` answers have ended, at the rate of the last ones; at least 1."""
        if len(self._ends) < 2:
            return 1
        seconds = max(1e-3, self._clock() - self._ends[0])
        return min(MAX_RETRY_AFTER_S, max(1, math.ceil((num_queued + 1) * seconds / len(self._ends))))

    def _refused(self, reason: str, queued: int) -> ApiError:
        self._on_refusal(reason)
        return ApiError(
            OVERLOADED,
            f"{queued} answers wait for their turn already ({reason})",
            retry_after_s=self.predicted_wait_s(queued),
        )
