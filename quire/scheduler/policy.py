"""Scheduling policies: in which order requests are served, and which may take another one's place.

A policy gives each request a rank when it arrives. The smallest rank is served first, the largest is preempted first;
ranks are unique and never change. Ranks of different classes do more than order the queue: a request that waits takes
row and pages from one of a laxer class that runs. Pure functions, used by the scheduler.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from quire.core.engine_messages import EngineCoreRequest
from quire.errors import unknown_name

# A rank is a class and below it this many bits for the order of arrival; both fit into 64 bits.
ARRIVAL_BITS = 40

Ranking = Callable[[EngineCoreRequest, int], int]


def by_arrival(request: EngineCoreRequest, arrival: int) -> int:
    """First come, first served; all are of one class."""
    return arrival


def by_priority(request: EngineCoreRequest, arrival: int) -> int:
    """The lowest `priority` first, each a class of its own; then by arrival."""
    return (request.priority << ARRIVAL_BITS) + arrival


POLICIES: Mapping[str, Ranking] = {"fcfs": by_arrival, "priority": by_priority}


def make_ranking(policy: str) -> Ranking:
    """What gives the ranks of a `scheduling_policy`: (request, how many arrived before it) -> rank.

    Raises:
        ConfigError: there is no such policy.
    """
    if policy not in POLICIES:
        raise unknown_name("scheduling_policy", policy, POLICIES)
    return POLICIES[policy]


def is_laxer(ranks: np.ndarray, rank: int) -> np.ndarray:
    """Which of `ranks` ([n] int64) are of a laxer class than `rank`; [n] bool."""
    laxer: np.ndarray = (ranks >> ARRIVAL_BITS) > (rank >> ARRIVAL_BITS)
    return laxer
