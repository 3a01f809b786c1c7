"""A policy, and a scheduler that counts its steps."""

from __future__ import annotations

from typing import Any

import numpy as np

from quire.core.request import Request
from quire.scheduler.interface import SchedulerInterface
from quire.scheduler.policy import Ranking
from quire.scheduler.request_table import RequestTable
from quire.scheduler.scheduler import Scheduler


class LongestFirst(Ranking):
    """The longest prompt first, then by arrival; nobody makes room."""

    quire_contract = 1
    keeps_pace = True

    def __init__(self, expected: Any, kv: Any) -> None:
        """Neither what answers came to nor the cache matters to this one."""

    def __call__(self, request: Request, arrival: int) -> int:
        return (-len(request.token_ids) << 40) + arrival

    def has_lower_priority(self, ranks: np.ndarray, rank: int) -> np.ndarray:
        return np.zeros(len(ranks), dtype=np.bool_)

    def preemptible(self, lower_priority: np.ndarray, table: RequestTable, waiting: Request) -> np.ndarray:
        return lower_priority


class Unfinished(Ranking):
    """Forgot its methods."""

    quire_contract = 1


class AcmeScheduler(Scheduler, SchedulerInterface):
    """Quire's own, which it replaces as a whole, with a count of its steps."""

    quire_contract = 1
    num_steps = 0

    def schedule(self) -> Any:
        self.num_steps += 1
        return super().schedule()
