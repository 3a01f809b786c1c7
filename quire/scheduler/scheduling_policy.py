"""SchedulingPolicy: who is served first, who last, and who makes room for whom. What a scheduling policy is made of.

Made once by the scheduler, which asks it wherever order matters: the queue, the running rows, the choice of victims.
`RankOrder` is a ranking and nothing else; `fair_order.FairOrder` changes with what tenants have got.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from quire.core.request import Request
from quire.kv_cache.manager import KVCacheManager
from quire.scheduler.fair_order import FairOrder
from quire.scheduler.policy import RANKINGS, ExpectedOutputs, Ranking, make_ranking
from quire.scheduler.request_queue import RequestQueue
from quire.scheduler.request_table import RequestTable
from quire.scheduler.running import RunningRows
from quire.scheduler.step_costs import StepCosts
from quire.scheduler.virtual_counters import VirtualCounters


class WaitingRequests(Protocol):
    """Requests that wait for a row; as `RequestQueue`."""

    def add(self, request: Request) -> None:
        """Put a request in its place: newly arrived, preempted, or passed over in this step."""

    def peek(self) -> Request:
        """The next request to serve; there must be one."""

    def pop(self) -> Request:
        """Remove and return the next request to serve; there must be one."""

    def remove(self, handle: int) -> Request | None:
        """Remove a request wherever it stands; None when it is not here."""

    def handles(self) -> list[int]:
        """Who is here, in no order."""

    def __len__(self) -> int:
        """How many there are."""


class SchedulingPolicy(Protocol):
    """The order of all requests.

    Attributes:
        queue: those that wait.
        service: what tenants were served; None = it is of no interest.
    """

    service: VirtualCounters | None

    @property
    def queue(self) -> WaitingRequests:
        """Requests that wait, the next one first."""

    def enter(self, request: Request, arrival: int) -> None:
        """A request arrived, after `arrival` others; gives it its rank. The caller adds it to the queue."""

    def refresh(self, running: RunningRows) -> None:
        """A step begins: bring the running rows into order."""

    def prompt_order(self, rows: np.ndarray) -> np.ndarray | None:
        """[num_rows] which of all running rows is the first, second, ... to compute its prompt; None = as they come.

        Asked where the pace of decoding requests bounds prompt tokens.
        """

    def share_step(self, rows: np.ndarray, num_wanted: np.ndarray, costs: StepCosts) -> int:
        """Set `num_wanted` ([num_rows] tokens of all running rows) to 0 for decoding ones that sit out the step.

        Returns:
            The requests of a step that is fair to all tenants; 0 = there are no several.
        """

    def make_queue(self) -> WaitingRequests:
        """Another queue of the same order, for requests that were preempted."""

    def has_lower_priority(self, rows: np.ndarray, waiting: Request) -> np.ndarray:
        """[num_rows] bool: who comes after `waiting`, and may have to make room for it."""

    def whose_prompts_wait(self, rows: np.ndarray, waiting: Request) -> np.ndarray:
        """[num_rows] bool: those of lower priority whose prompts wait in a step in which `waiting` can come in."""

    def has_higher_priority(self, one: Request, other: Request) -> bool:
        """Whether `one` comes first, whatever was computed for `other` already."""

    def may_preempt_others(self, waiting: Request) -> bool:
        """Whether requests of lower priority make room for a waiting one, or hold their prompts in its first step."""

    def may_outpace(self, decoding: np.ndarray, waiting: Request) -> bool:
        """Whether a request that others make room for computes its prompt at once, however that slows these rows."""

    def preemptible(self, lower_priority: np.ndarray, waiting: Request) -> np.ndarray:
        """[n] rows among `lower_priority` that may be preempted for `waiting`, the last one first."""

    def note_started(self, request: Request, num_prompt_tokens: int) -> None:
        """A request got its first row; `num_prompt_tokens` of its prompt are to be computed."""

    def note_sampled(self, rows: np.ndarray) -> None:
        """Each of these rows got a token."""

    def note_ended(self, request: Request, num_output_tokens: int, *, is_complete: bool) -> None:
        """A request ended; `is_complete` when neither abort nor error cut it off. It may still have its row."""


class RankOrder:
    """The order of a ranking: `fcfs`, `priority`, `shortest`."""

    def __init__(self, ranking: Ranking, expected: ExpectedOutputs, table: RequestTable) -> None:
        self._ranking = ranking
        self._expected = expected
        self._table = table
        self.queue = RequestQueue()
        self.service: VirtualCounters | None = None

    def enter(self, request: Request, arrival: int) -> None:
        """As `SchedulingPolicy`."""
        request.rank = self._ranking(request, arrival)

    def refresh(self, running: RunningRows) -> None:
        """Ranks never change, so the rows are in order."""

    def has_lower_priority(self, rows: np.ndarray, waiting: Request) -> np.ndarray:
        """As `SchedulingPolicy`."""
        return self._ranking.has_lower_priority(self._table.rank[rows], waiting.rank)

    def whose_prompts_wait(self, rows: np.ndarray, waiting: Request) -> np.ndarray:
        """All of lower priority."""
        return self.has_lower_priority(rows, waiting)

    def prompt_order(self, rows: np.ndarray) -> None:
        """That of the rows."""

    def share_step(self, rows: np.ndarray, num_wanted: np.ndarray, costs: StepCosts) -> int:
        """Tenants are nothing to a ranking."""
        return 0

    def make_queue(self) -> RequestQueue:
        """As `SchedulingPolicy`."""
        return RequestQueue()

    def has_higher_priority(self, one: Request, other: Request) -> bool:
        """As `SchedulingPolicy`."""
        return bool(self._ranking.has_lower_priority(np.array([other.rank]), one.rank)[0])

    def may_preempt_others(self, waiting: Request) -> bool:
        """As `SchedulingPolicy`; the class alone counts."""
        return True

    def may_outpace(self, decoding: np.ndarray, waiting: Request) -> bool:
        """As the ranking says, where all of them have lower priority."""
        return not self._ranking.keeps_pace and bool(self.has_lower_priority(decoding, waiting).all())

    def preemptible(self, lower_priority: np.ndarray, waiting: Request) -> np.ndarray:
        """As the ranking says."""
        return self._ranking.preemptible(lower_priority, self._table, waiting)

    def note_started(self, request: Request, num_prompt_tokens: int) -> None:
        """Nothing changes."""

    def note_sampled(self, rows: np.ndarray) -> None:
        """Nothing changes."""

    def note_ended(self, request: Request, num_output_tokens: int, *, is_complete: bool) -> None:
        """As `SchedulingPolicy`."""
        if is_complete:
            self._expected.note_answer(request.message.sampling_params, num_output_tokens)


def make_scheduling_policy(policy: str, table: RequestTable, kv: KVCacheManager) -> SchedulingPolicy:
    """What `scheduling_policy` asks for.

    Raises:
        ConfigError: there is no such policy.
    """
    expected = ExpectedOutputs()
    if policy == "fair":
        rankings = {name: make_ranking(name, expected, kv) for name in RANKINGS}
        return FairOrder(rankings, expected, table, kv)
    return RankOrder(make_ranking(policy, expected, kv), expected, table)
