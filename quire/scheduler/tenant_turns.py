"""TenantTurns: how much of a step one tenant may take while others have requests that run.

Called by `FairOrder`. A step is as long as all that it holds, so a tenant that decodes a hundred requests slows down
another's single one. Steps of several tenants are therefore measured against a fair one, in which each has as many
requests, by weight, as the one with the fewest: decoding requests may bring a step half of the way
to `max_decode_slowdown` times its duration, prompts beside them the rest. Beyond, the requests of the tenants that have
more take turns; they keep rows and blocks. Who has the fewest always runs, and of every tenant at least its share.

Example: one stream of tenant a, 100 of b, steps of 1 ms + 0.1 ms a request, slowdown 2. A fair step holds 2 requests
and lasts 1.2 ms. Up to 1.8 ms are for decoding: 8 requests, the one of a and 7 of b's, which rotate. Without a all run.

Owns when each row had its last turn.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from quire.scheduler.request_table import RequestTable, RowFlag
from quire.scheduler.step_costs import StepCosts


class TenantTurns:
    """Which decoding requests of tenants with many sit out a step.

    Args:
        table: of the running requests.
    """

    def __init__(self, table: RequestTable) -> None:
        self._table = table
        self._last_turn = np.zeros(len(table.handle), dtype=np.int64)
        self._num_turns = 0

    def share_step(
        self, rows: np.ndarray, num_wanted: np.ndarray, weights: np.ndarray, waiting: Sequence[int], costs: StepCosts
    ) -> int:
        """Take their token from requests that sit out this step.

        Args:
            rows: [num_rows] all that run.
            num_wanted: [num_rows] tokens they would compute; set to 0 in place.
            weights: [num_slots] of tenants.
            waiting: slots of the tenants that have waiting requests.

        Returns:
            The requests of the step that prompts are measured against; 0 = there are not several tenants.
        """
        owner = self._table.tenant_slot[rows]
        running = np.unique(owner[num_wanted > 0])
        active = np.union1d(running, np.array(waiting, dtype=running.dtype)) if waiting else running
        if len(active) < 2:
            return 0
        is_decoding = (num_wanted > 0) & ~self._table.is_prefill(rows)
        num_decoding = np.bincount(owner[is_decoding], minlength=len(weights))[active]
        total, active_weights = int(num_decoding.sum()), weights[active]
        least = float((np.maximum(num_decoding, 1) / active_weights).min())
        num_fair = int(np.maximum(1, active_weights * least).sum())
        if len(running) < 2:  # a waiting tenant may wait for long: no other sits out a step for it
            return max(num_fair, total)
        most = costs.most_decoding(num_fair, total)
        if total > most:
            for slot, quota in zip(active, quotas(num_decoding, active_weights, most), strict=True):
                self._take_turns(rows, num_wanted, np.flatnonzero(is_decoding & (owner == slot)), int(quota))
        return num_fair

    def _take_turns(self, rows: np.ndarray, num_wanted: np.ndarray, entries: np.ndarray, quota: int) -> None:
        """Of these entries of `rows`, the `quota` whose last turn was longest ago keep their token; beams all do."""
        entries = entries[(self._table.flags[rows[entries]] & RowFlag.BEAM.value) == 0]
        waited_most = np.argsort(self._last_turn[rows[entries]], kind="stable")
        served = rows[entries[waited_most[:quota]]]
        self._last_turn[served] = self._num_turns + np.arange(len(served))
        self._num_turns += len(served)
        num_wanted[entries[waited_most[quota:]]] = 0


def quotas(num_decoding: np.ndarray, weights: np.ndarray, most: int) -> np.ndarray:
    """[n] how many requests of each tenant decode when at most `most` do: at least 1 of each that has any.

    Who has fewer than its share by weight leaves the rest to the others.
    """
    granted: np.ndarray = np.minimum(num_decoding, 1)
    while (left := most - int(granted.sum())) > 0:
        wanting = np.flatnonzero(granted < num_decoding)
        if not len(wanting):
            break
        shares = np.floor(left * weights[wanting] / weights[wanting].sum()).astype(granted.dtype)
        if not shares.any():
            wanting, shares = wanting[:left], np.ones(min(left, len(wanting)), dtype=granted.dtype)
        granted[wanting] = np.minimum(num_decoding[wanting], granted[wanting] + shares)
    return granted
