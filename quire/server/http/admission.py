"""Admission: how much is in the engine, and whether more may come in.

Asked by the routes before a request is given to the engine, and when it ends. Owns the counts.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator

from quire.config.server import LimitsConfig
from quire.core.stats import SchedulerStats
from quire.server.http.errors import OVERLOADED, UNAVAILABLE, ApiError
from quire.server.http.tenants import Charge, Tenant
from quire.server.http.wait_estimate import WaitEstimate

MAX_RETRY_AFTER_S = 120


class Ticket:
    """A request's place in the counts."""

    __slots__ = ("max_tokens", "num_answers", "num_tokens", "tenant")

    def __init__(self, num_answers: int, num_tokens: int, tenant: Tenant | None, max_tokens: int | None) -> None:
        self.num_answers = num_answers
        self.num_tokens = num_tokens
        self.tenant = tenant
        self.max_tokens = max_tokens


class Admission:
    """Counts answers from admission to their end.

    Args:
        limits: of what may wait.
        max_num_seqs: answers that the engine computes at once.
        clock: seconds.

    Attributes:
        is_draining: no new work is taken.
        on_idle: called when the last answer has ended; quick, raises nothing.
    """

    def __init__(self, limits: LimitsConfig, max_num_seqs: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits
        self._max_num_seqs = max_num_seqs
        self._clock = clock
        self._stats = SchedulerStats()
        self._wait = WaitEstimate()
        self._tickets: dict[Ticket, None] = {}  # oldest first
        self._num_answers = self._num_tokens = 0
        self.is_draining = False
        self.on_idle: Callable[[], None] = lambda: None

    def note_step(self, stats: SchedulerStats) -> None:
        """Take in the state of the control plane."""
        self._stats = stats
        self._wait.note_step(stats, self._clock())

    def note_answers(self, num_tokens: int, num_answers: int) -> None:
        """Answers have ended with so many new tokens together."""
        self._wait.note_answers(num_tokens, num_answers)

    @property
    def num_answers(self) -> int:
        """Answers that were admitted and have not ended."""
        return self._num_answers

    @property
    def num_own_answers(self) -> int:
        """Those of this process."""
        return self._num_answers

    @property
    def num_tokens(self) -> int:
        """Tokens of their prompts."""
        return self._num_tokens

    @property
    def num_queued(self) -> int:
        """Answers that wait: more than the engine computes at once, or than its last step held when others waited."""
        return max(0, self.num_answers - self._num_places)

    def begin(self, num_answers: int, num_tokens: int, tenant: Tenant, num_prompts: int = 1) -> Charge:
        """Charge a tenant for a request before its prompts are worked on.

        Args:
            num_answers: prompts times n; 0 = none are asked for.
            num_tokens: that its prompts have at least.
            num_prompts: each counts as a request.

        Raises:
            ApiError: as `enter`; nothing was charged.
        """
        self.refuse_when_draining()
        self._check_queue(num_answers, num_tokens, tenant)
        return tenant.begin(num_tokens, num_prompts)

    def enter(
        self,
        num_answers: int,
        num_tokens: int,
        tenant: Tenant | None = None,
        max_tokens: int | None = None,
        charge: Charge | None = None,
    ) -> Ticket:
        """Count a request in, and charge its tenant.

        Args:
            num_answers: prompts times n.
            num_tokens: of its prompts.
            max_tokens: of each answer; None = as many as fit.
            charge: what the tenant was charged for it before.

        Raises:
            ApiError: the server is ending, too much waits already, or the tenant may not have it run now.
        """
        self.refuse_when_draining()
        if tenant is not None:
            tenant.check(num_tokens, charge=charge)
        self._check_queue(num_answers, num_tokens, tenant)
        if tenant is not None:
            tenant.enter(num_answers, num_tokens, charge)
        ticket = Ticket(num_answers, num_tokens, tenant, max_tokens)
        self._add(ticket)
        return ticket

    def leave(self, ticket: Ticket) -> None:
        """A request has ended; harmless when repeated."""
        if ticket not in self._tickets:
            return
        self._remove(ticket)
        if ticket.tenant is not None:
            ticket.tenant.leave(ticket.num_answers)
        if not self._num_answers:
            self.on_idle()

    def refuse_when_draining(self) -> None:
        """Raise when the server takes no new work."""
        if self.is_draining:
            raise ApiError(UNAVAILABLE, "the server is shutting down", retry_after_s=1, reason="draining")

    def predicted_wait_s(self) -> int:
        """As `estimated_wait_s`, in [1, MAX_RETRY_AFTER_S]; 1 while nothing was measured."""
        seconds = self.estimated_wait_s()
        return 1 if seconds is None else min(MAX_RETRY_AFTER_S, max(1, math.ceil(seconds)))

    def estimated_wait_s(self) -> float | None:
        """Seconds that a request would wait for its turn if it came last now; None while nothing was measured."""
        waiting = (
            (count, ticket.num_tokens * count / ticket.num_answers, ticket.max_tokens)
            for ticket, count in self._queued()
        )
        return self._wait.wait_s(waiting)

    def waits_s(self, waiting: Iterable[tuple[float, float, int | None]]) -> list[float | None]:
        """Seconds until its turn of each of these, (answers, prompt tokens, `max_tokens`) in the order of service."""
        return list(self._wait.waits_s(waiting))[:-1]

    def _add(self, ticket: Ticket) -> None:
        self._tickets[ticket] = None
        self._num_answers += ticket.num_answers
        self._num_tokens += ticket.num_tokens

    def _remove(self, ticket: Ticket) -> None:
        del self._tickets[ticket]
        self._num_answers -= ticket.num_answers
        self._num_tokens -= ticket.num_tokens

    def _newest_first(self) -> Iterable[Ticket]:
        """All that have not left."""
        return reversed(self._tickets)

    @property
    def _num_places(self) -> int:
        return self._stats.num_running if self._stats.num_waiting else self._max_num_seqs

    def _check_queue(self, num_answers: int, num_tokens: int, tenant: Tenant | None) -> None:
        """Refuse what would wait behind too much. A request that finds nothing else under way is always taken."""
        max_reqs, max_tokens = self._limits.max_num_queued_reqs, self._limits.max_num_queued_tokens
        would_queue = max(0, num_answers - max(0, self._num_places - self.num_answers))
        if (max_reqs is None and max_tokens is None) or not would_queue or not self.num_answers:
            return
        num_queued, tokens_queued = would_queue, float(num_tokens)
        own_queued, own_tokens = would_queue, float(num_tokens)
        for ticket, count in self._queued():
            tokens = ticket.num_tokens * count / ticket.num_answers
            num_queued += count
            tokens_queued += tokens
            if ticket.tenant is tenant:
                own_queued += count
                own_tokens += tokens
        if max_reqs is not None and num_queued > max_reqs:
            raise self._refused("max_num_queued_reqs", "the queue is full (max_num_queued_reqs)")
        if max_tokens is not None and tokens_queued > max_tokens:
            raise self._refused("max_num_queued_tokens", "the queue is full (max_num_queued_tokens)")
        share = None if tenant is None else tenant.limits.queue_share
        if share is not None and (
            (max_reqs is not None and own_queued > share * max_reqs)
            or (max_tokens is not None and own_tokens > share * max_tokens)
        ):
            raise self._refused("queue_share", "this API key's share of the queue is full (queue_share)")

    def _queued(self) -> Iterator[tuple[Ticket, int]]:
        """The requests that wait, with how many answers of theirs do: the engine takes up the oldest first."""
        left = self.num_queued
        for ticket in self._newest_first():
            if not left:
                return
            count = min(left, ticket.num_answers)
            left -= count
            yield ticket, count

    def _refused(self, reason: str, message: str) -> ApiError:
        return ApiError(OVERLOADED, f"{message} ({reason})", retry_after_s=self.predicted_wait_s(), reason=reason)
