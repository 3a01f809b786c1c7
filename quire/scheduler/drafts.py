"""Drafts: guesses at the next tokens of rows that decode, which take what is left of a step's tokens and free blocks.

Called by the scheduler when everything else of a step is planned, so drafts keep no request waiting. No state but the
proposer: blocks reserved ahead for drafts belong to the row, and go back when the drafts behind them are not accepted.
"""

from __future__ import annotations

import numpy as np

from quire.core.draft_proposer import DraftProposer
from quire.core.scheduler_output import SchedulerOutput
from quire.errors import UnsupportedError
from quire.kv_cache.manager import KVCacheManager
from quire.scheduler.request_table import RequestTable, RowFlag
from quire.scheduler.step_plan import StepPlan

_IS_BEAM = int(RowFlag.BEAM)


class Drafts:
    """Adds draft tokens to plans.

    Args:
        proposer: None = there are never any.

    Raises:
        UnsupportedError: the model keeps states that cannot be taken back to before a draft.
    """

    def __init__(self, proposer: DraftProposer | None, table: RequestTable, kv: KVCacheManager) -> None:
        if proposer is not None and not kv.can_take_back:
            raise UnsupportedError(
                "draft tokens need a model whose cache can be taken back; this one has recurrent layers",
                hint="leave out the proposer",
            )
        self._propose = None if proposer is None else proposer.propose
        self._table = table
        self._kv = kv

    def add(self, plan: StepPlan, rows: np.ndarray) -> None:
        """Draft for those of the running `rows` that decode in this step; of beams for none."""
        if self._propose is None or not plan.budget.num_left:
            return
        table = self._table
        may_draft = (plan.num_tokens(rows) > 0) & ~table.is_prefill(rows) & ((table.flags[rows] & _IS_BEAM) == 0)
        may_draft &= table.num_pending[rows] == 0  # the token before a draft is known
        may_draft &= ~np.array([plan.is_new(row) for row in rows.tolist()], dtype=np.bool_)
        for row in rows[may_draft].tolist():
            num_tokens = int(table.num_tokens[row])
            most = min(plan.budget.num_left, int(table.max_total_tokens[row]) - num_tokens - 1)
            if most <= 0:  # after its drafts a token is sampled
                continue
            drafts = self._propose(table.token_ids[row, :num_tokens], most)[:most]
            if not len(drafts):
                continue
            at = np.array([row], dtype=np.intp)
            missing = self._kv.num_missing_blocks(at, table.num_tokens[at] + len(drafts))
            if not self._kv.is_short(missing):
                plan.add_drafts(row, drafts, self._kv.allocate(at, missing))

    def give_back_blocks(self, scheduled: SchedulerOutput, rows: np.ndarray) -> None:
        """Free what was reserved for drafts that were not accepted, of those of `rows` that still run."""
        if scheduled.drafts is None:
            return
        drafting = rows[np.isin(rows, scheduled.rows[scheduled.drafts.counts > 0]) & (self._table.handle[rows] >= 0)]
        for row, num_tokens in zip(drafting.tolist(), self._table.num_computed_tokens[drafting].tolist(), strict=True):
            self._kv.free_beyond(row, num_tokens)
