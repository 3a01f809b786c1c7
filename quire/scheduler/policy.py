"""Scheduling policies that rank requests: in which order they are served, and which may take another one's place.

A ranking gives each request a number when it arrives, which never changes and which no other has: the smallest is
served first, the largest is preempted first. Used by `service_order`; the only state is what answers came to so far.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from quire.core.request import Request
from quire.core.sampling_params import SamplingParams
from quire.kv_cache.manager import KVCacheManager
from quire.plugins import SCHEDULING_POLICY, load_plugin, unknown_choice
from quire.scheduler.request_table import RequestTable

# A rank by priority is a class and below it this many bits for the order of arrival; both fit into 64 bits.
ARRIVAL_BITS = 40
# Under `shortest`, the work in tokens that each later arrival makes up for.
AGE_TOKENS = 4
# Under `shortest`, a request yields only to one whose rank is smaller by more than this, in tokens of work, and only
# while so many times the newcomer's work is left of it.
YIELD_MARGIN_TOKENS = 32
YIELD_FACTOR = 2
# Below a rank by work, bits that tell requests apart which come out even; with so much work they cannot be further
# apart in order of arrival.
TIE_BITS = 22
RANKINGS = ("fcfs", "priority", "shortest")
# Answers over which the part of `max_tokens` that they came to is averaged.
NUM_ANSWERS_AVERAGED = 32


class Ranking(Protocol):
    """What one policy makes of requests. A plugin's class is derived from it and made with `expected` and `kv`.

    Attributes:
        keeps_pace: a request that others make room for still computes its prompt at the pace of those that decode.
    """

    keeps_pace: bool

    def __call__(self, request: Request, arrival: int) -> int:
        """The rank of a request before which `arrival` others came."""

    def has_lower_priority(self, ranks: np.ndarray, rank: int) -> np.ndarray:
        """Which of `ranks` ([n] int64) have to make room for a waiting request of rank `rank`; [n] bool."""

    def preemptible(self, lower_priority: np.ndarray, table: RequestTable, waiting: Request) -> np.ndarray:
        """[m] those of rows `lower_priority`, in their order, that may be preempted for `waiting`."""


class ByArrival:
    """First come, first served."""

    keeps_pace = True

    def __call__(self, request: Request, arrival: int) -> int:
        """As `Ranking`."""
        return arrival

    def has_lower_priority(self, ranks: np.ndarray, rank: int) -> np.ndarray:
        """No request makes room."""
        return np.zeros(len(ranks), dtype=np.bool_)

    def preemptible(self, lower_priority: np.ndarray, table: RequestTable, waiting: Request) -> np.ndarray:
        """None are asked for."""
        return lower_priority


class ByPriority:
    """The lowest `priority` first, each a class of its own; then by arrival."""

    keeps_pace = False

    def __call__(self, request: Request, arrival: int) -> int:
        """As `Ranking`."""
        return (request.message.priority << ARRIVAL_BITS) + arrival

    def has_lower_priority(self, ranks: np.ndarray, rank: int) -> np.ndarray:
        """Classes of higher numbers make room."""
        lower_priority: np.ndarray = (ranks >> ARRIVAL_BITS) > (rank >> ARRIVAL_BITS)
        return lower_priority

    def preemptible(self, lower_priority: np.ndarray, table: RequestTable, waiting: Request) -> np.ndarray:
        """All of them."""
        return lower_priority


class ExpectedOutputs:
    """How long answers become, from those that have ended: a part of `max_tokens`, at first all of it."""

    def __init__(self) -> None:
        self._part = 1.0

    def note_answer(self, params: SamplingParams, num_output_tokens: int) -> None:
        """An answer came to its own end, or to its limit."""
        if params.max_tokens and not params.ignore_eos:
            self._part += (num_output_tokens / params.max_tokens - self._part) / NUM_ANSWERS_AVERAGED

    def of(self, params: SamplingParams) -> int:
        """Tokens that an answer is expected to have."""
        max_tokens = params.max_tokens or 0
        return max_tokens if params.ignore_eos else round(self._part * max_tokens)


class ShortestFirst:
    """The least work first: prompt tokens to compute and output tokens to expect, both as of the arrival.

    The rank is a request's work plus AGE_TOKENS for each arrival before it. A waiting request goes before running ones
    of larger ranks, and takes the place of those of which YIELD_FACTOR times its own work is left: long ones yield to
    short ones, and those that are about as long, or about to end, do not stop each other.

    Bound: fewer than w / AGE_TOKENS of the requests that come after one of w tokens of work start while it waits,
    before its first turn or stopped, whatever comes: the others have larger ranks. Each of these stops it at most once
    for every time that it begins to run itself. After them it is the first in rank, which is never preempted.

    Args:
        expected: how long answers become.
        kv: knows what of an arriving request need not be computed.
    """

    keeps_pace = True

    def __init__(self, expected: ExpectedOutputs, kv: KVCacheManager) -> None:
        self._expected = expected
        self._kv = kv

    def __call__(self, request: Request, arrival: int) -> int:
        """As `Ranking`."""
        return (self.work(request) + AGE_TOKENS * arrival << TIE_BITS) + arrival % (1 << TIE_BITS)

    def work(self, request: Request) -> int:
        """Tokens that are to be computed for a request, at least 1; one that is continued counts what is left."""
        num_put_out = len(request.token_ids) - request.num_prompt_tokens
        num_outputs = max(0, self._expected.of(request.message.sampling_params) - num_put_out)
        work = len(request.token_ids) - self._kv.get_computed_blocks(request).num_tokens + num_outputs
        return min(max(1, work), AGE_TOKENS << TIE_BITS)

    def has_lower_priority(self, ranks: np.ndarray, rank: int) -> np.ndarray:
        """Those that come later by more than YIELD_MARGIN_TOKENS."""
        lower_priority: np.ndarray = ranks > rank + (YIELD_MARGIN_TOKENS << TIE_BITS)
        return lower_priority

    def preemptible(self, lower_priority: np.ndarray, table: RequestTable, waiting: Request) -> np.ndarray:
        """Those of which much more is left than `waiting` takes."""
        least = YIELD_FACTOR * self.work(waiting)
        is_long = [self._left_of(row, table) >= least for row in lower_priority.tolist()]
        return lower_priority[np.array(is_long, dtype=np.bool_)]

    def _left_of(self, row: int, table: RequestTable) -> int:
        """Tokens that are expected to be computed on a row until its request ends."""
        num_tokens = int(table.num_tokens[row])
        num_put_out = num_tokens - int(table.num_prompt_tokens[row])
        num_expected = self._expected.of(table.request_on(row).message.sampling_params)
        return num_tokens - int(table.num_computed_tokens[row]) + max(0, num_expected - num_put_out)


def make_ranking(policy: str, expected: ExpectedOutputs, kv: KVCacheManager) -> Ranking:
    """The ranking that a policy's name stands for; `expected` and `kv` as in `ShortestFirst`.

    Raises:
        ConfigError: there is no such policy, or the plugin cannot be used.
    """
    if policy == "fcfs":
        return ByArrival()
    if policy == "priority":
        return ByPriority()
    if policy == "shortest":
        return ShortestFirst(expected, kv)
    ranking: Ranking = plugin_ranking(policy)(expected, kv)
    return ranking


def plugin_ranking(policy: str) -> type[Any]:
    """The class of a plugin's policy, which is made as `ShortestFirst` is.

    Raises:
        ConfigError: there is none, or it cannot be used.
    """
    found: type[Any] | None = load_plugin(SCHEDULING_POLICY, policy, Ranking)
    if found is None:
        raise unknown_choice(SCHEDULING_POLICY, policy, [*RANKINGS, "fair"])
    return found
