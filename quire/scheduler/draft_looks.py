"""DraftLooks: drafts that are not verified, only compared with the tokens that came; for loads not drafted for.

Called by the scheduler's drafts in plain steps that a controller wants to look at. Owns the look whose tokens are not
all known yet; there is one at most.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from quire.core.drafts import DraftRows, Proposals, StepLoad
from quire.scheduler.request_table import RequestTable

MOST_ROWS = 4
"""Of a look: what they show holds for the others."""

MOST_IN_VAIN = 3
"""Looks in a row that were repeated and found nothing again: then they are not repeated any more."""

Observe = Callable[[StepLoad, Proposals, np.ndarray], None]


class _Look(NamedTuple):
    """Rows, their requests and how many tokens they had when these proposals were made."""

    load: StepLoad
    rows: DraftRows
    proposals: Proposals


class DraftLooks:
    """Looks at proposals.

    Args:
        observe: called when it is known how many drafts of each row of a look would have stood.
    """

    def __init__(self, table: RequestTable, propose: Callable[[DraftRows], Proposals], observe: Observe) -> None:
        self._table = table
        self._propose = propose
        self._observe = observe
        self._newest: _Look | None = None
        self._is_second = False
        self._num_in_vain = 0

    def look(self, load: StepLoad, rows: DraftRows) -> bool:
        """Have these rows drafted for; False = there was nothing, which counts if the next step has nothing, either.

        A model on the worker has drafts in the step behind the one that first asked for them.
        """
        if self._newest is not None:
            return True
        proposals = self._propose(rows)
        is_empty = not len(proposals.token_ids)
        if self._is_second:
            self._num_in_vain = self._num_in_vain + 1 if is_empty else 0
        self._is_second = is_empty and not self._is_second and self._num_in_vain < MOST_IN_VAIN
        if self._is_second:
            return False
        self._newest = _Look(load, rows, proposals)
        return True

    def settle(self) -> None:
        """Compare the newest look with what came, if all is known; it is forgotten with its requests."""
        if self._newest is None:
            return
        load, rows, proposals = self._newest
        table, counts = self._table, proposals.counts
        if (table.handle[rows.rows] != rows.handles).any():
            self._newest = None
        elif (table.num_tokens[rows.rows] >= rows.num_tokens + counts).all():
            self._newest = None
            self._observe(load, proposals, self._num_right(rows, proposals))

    def _num_right(self, rows: DraftRows, proposals: Proposals) -> np.ndarray:
        accepted = np.zeros_like(proposals.counts)
        start = 0
        for number, count in enumerate(proposals.counts.tolist()):
            first = int(rows.num_tokens[number])
            came = self._table.token_ids[rows.rows[number], first : first + count]
            is_right = came == proposals.token_ids[start : start + count]
            accepted[number] = count if is_right.all() else int(np.argmin(is_right))
            start += count
        return accepted
