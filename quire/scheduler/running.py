"""The rows that run, and what each of them computes in a step.

Called by the scheduler. `RunningRows` owns the order of the running rows; the functions decide nothing but
token counts, for all rows at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from quire.kv_cache.block_demand import PoolCounts
from quire.kv_cache.manager import KVCacheManager
from quire.scheduler.budget import TokenCap, WantedTokens, apply_caps
from quire.scheduler.request_table import RequestTable
from quire.scheduler.step_plan import StepPlan


class RunningRows:
    """Rows of running requests in the order in which they are served: by rank, unless they were arranged otherwise.

    Attributes:
        rows: [num_running] intp (what numpy indexes fastest with); replaced, never written in place.
    """

    def __init__(self, table: RequestTable) -> None:
        self._rank = table.rank
        self.rows = np.empty(0, dtype=np.intp)

    def __len__(self) -> int:
        return len(self.rows)

    def add(self, row: int) -> None:
        """Insert a row in its place."""
        place = int(np.searchsorted(self._rank[self.rows], self._rank[row]))
        self.rows = np.concatenate([self.rows[:place], np.array([row], dtype=np.intp), self.rows[place:]])

    def remove(self, rows: Sequence[int]) -> None:
        """Remove rows that are here."""
        self.rows = self.rows[~np.isin(self.rows, rows)]

    def arrange(self, rows: np.ndarray) -> None:
        """Bring the rows into another order; `rows` are the same ones."""
        self.rows = rows

    def last(self) -> int:
        """The row of the request that is served last; there must be one."""
        return int(self.rows[-1])


def num_wanted_tokens(
    rows: np.ndarray, num_left: np.ndarray, table: RequestTable, caps: Sequence[TokenCap], num_unfinished: int
) -> np.ndarray:
    """[num_rows] tokens each row would compute if the budget were no limit: all `num_left` it has, cut by the caps."""
    if not caps:
        return num_left
    wanted = WantedTokens(
        num_tokens=num_left, starts=table.starts(rows),
        request_of=lambda i: table.request_on(int(rows[i])), num_unfinished=num_unfinished,
    )  # fmt: skip
    return apply_caps(caps, wanted)


def num_missing_blocks(rows: np.ndarray, table: RequestTable, plan: StepPlan, kv: KVCacheManager) -> np.ndarray:
    """[num_groups, num_rows] blocks each row lacks to compute what is planned for it."""
    return kv.num_missing_blocks(rows, table.starts(rows) + plan.num_tokens(rows))


def num_blocks_to_grow(rows: np.ndarray, table: RequestTable, kv: KVCacheManager, num_steps: int) -> PoolCounts:
    """Blocks that these rows lack for so many decode steps."""
    grown = np.minimum(table.num_tokens[rows] + num_steps, table.max_total_tokens[rows])
    return kv.by_pool(kv.num_missing_blocks(rows, grown))
