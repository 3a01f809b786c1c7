"""What the current step has chosen so far. Made anew for every step by the scheduler, then frozen into a message.

Owns the step's token counts; every choice can be undone with one call until the plan is frozen.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from quire.core.kv_transfer import KVTransferMeta
from quire.core.request import Request
from quire.core.scheduler_output import (
    NO_BLOCK_COPIES,
    NO_ROW_UPDATES,
    BlockCopies,
    DraftTokens,
    NewBlocks,
    NewRequestData,
    RowUpdates,
    SchedulerOutput,
    StateBlocks,
)
from quire.kv_cache.block_demand import PoolCounts
from quire.scheduler.budget import StepBudget
from quire.scheduler.request_table import RequestTable
from quire.scheduler.waiting import Blocked

NO_ROWS = np.empty(0, dtype=np.intp)
PlanStates = Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray], tuple[StateBlocks, ...]]


class StepPlan:
    """Rows and tokens of one step.

    Attributes:
        budget: what is left of the step's tokens.
        prompts: what is left for requests that are admitted, where decoding requests bound prompt tokens.
        urgent: a waiting request for which the prompts of lower priority wait in this step; None = there is none.
        num_preemptions: requests that lost their row to this step.
        num_swap_preemptions: those of them whose blocks went to the swap space.
        num_prefix_queries, num_prefix_hits: tokens looked for, and found, in the prefix cache by first admissions.
        num_external_queries, num_external_hits: those that are not there, looked for and found in tiers behind it.
        num_promised: blocks that running rows still need for the tokens they have, pool for pool; None = not counted.
        blocked: the last refusal of admission, which says why requests wait; None = all that there were came in.
        rows: [num_reqs] intp; those of the message, once there is one.
    """

    def __init__(self, budget: StepBudget, max_num_seqs: int) -> None:
        self.budget = budget
        self.rows = NO_ROWS
        self._num_tokens_at_most = budget.num_left
        self.prompts = StepBudget(budget.num_left)
        self.preempting: Request | None = None
        self.num_preemptions = 0
        self.num_swap_preemptions = 0
        self.num_prefix_queries = 0
        self.num_prefix_hits = 0
        self.num_external_queries = 0
        self.num_external_hits = 0
        self.num_promised: PoolCounts | None = None
        self.blocked: Blocked | None = None
        self._num_tokens = np.zeros(max_num_seqs, dtype=np.int32)
        self._running_rows = NO_ROWS
        self._new_blocks: tuple[NewBlocks, ...] = ()
        self._new_reqs: dict[int, NewRequestData] = {}
        self._drafts: list[tuple[np.ndarray, ...]] = []  # row, token and states of each draft

    @property
    def is_empty(self) -> bool:
        """True while nothing is planned."""
        return self.total_num_tokens == 0

    @property
    def total_num_tokens(self) -> int:
        """Tokens planned so far, of all rows."""
        return self._num_tokens_at_most - self.budget.num_left

    def num_tokens(self, rows: np.ndarray) -> np.ndarray:
        """[num_rows] tokens planned for these rows."""
        num_tokens: np.ndarray = self._num_tokens[rows]
        return num_tokens

    def is_new(self, row: int) -> bool:
        """True when the row's request was placed in this step, so that the worker does not know it yet."""
        return row in self._new_reqs

    @property
    def has_new(self) -> bool:
        """Whether any request was placed in this step."""
        return bool(self._new_reqs)

    def add_running(self, rows: np.ndarray, num_wanted: np.ndarray) -> None:
        """Plan placed rows, in this order, with as many of the tokens they want as the budget holds."""
        self._running_rows = rows
        self._num_tokens[rows] = self.budget.take_in_order(num_wanted)

    def set_new_blocks(self, new_blocks: tuple[NewBlocks, ...]) -> None:
        """Note the blocks, per KV cache group, that the planned running rows were given."""
        self._new_blocks = new_blocks
        self.num_promised = None

    def add_drafts(
        self,
        rows: np.ndarray,
        counts: np.ndarray,
        token_ids: np.ndarray,
        new_blocks: tuple[NewBlocks, ...] = (),
        states: tuple[np.ndarray, ...] = (),
    ) -> None:
        """Plan draft tokens behind the token that running rows compute, and the blocks they were given, if any.

        Args:
            rows, counts: [num_rows] distinct rows, and how many drafts each has, at least 1.
            token_ids: [sum of counts] int32.
            states: blocks for the states before each draft, [sum of counts] int32 for each group that has states.
        """
        self.budget.take(len(token_ids))
        self._num_tokens[rows] += counts.astype(np.int32)
        self._drafts.append((rows.repeat(counts), token_ids, *states))
        if any(len(ahead.rows) for ahead in new_blocks):
            self._new_blocks = tuple(
                before.followed_by(ahead) for before, ahead in zip(self._new_blocks, new_blocks, strict=True)
            )

    def add_new(self, new_req: NewRequestData, num_tokens: int) -> None:
        """Plan a request that was placed on a row just now."""
        self.budget.take(num_tokens)
        self.prompts.take(num_tokens)
        self._num_tokens[new_req.row] = num_tokens
        self._new_reqs[new_req.row] = new_req

    def undo(self, row: int) -> None:
        """Drop a row from the plan, as if it had never been planned. Its blocks are the caller's concern."""
        num_tokens = int(self._num_tokens[row])
        self.budget.refund(num_tokens)
        self._num_tokens[row] = 0
        self.num_promised = None
        if self._new_reqs.pop(row, None) is not None:
            self.prompts.refund(num_tokens)

    def undo_running(self) -> None:
        """Drop all placed rows from the plan."""
        for row in self._running_rows.tolist():
            self.undo(row)

    def freeze(
        self,
        step: int,
        freed_rows: list[int],
        table: RequestTable,
        block_copies: BlockCopies = NO_BLOCK_COPIES,
        swap_outs: BlockCopies = NO_BLOCK_COPIES,
        swap_ins: BlockCopies = NO_BLOCK_COPIES,
        row_updates: RowUpdates = NO_ROW_UPDATES,
        kv_transfers: KVTransferMeta | None = None,
        plan_states: PlanStates | None = None,
    ) -> SchedulerOutput:
        """The plan as a message: running rows first, then new ones, each in the order planned.

        Args:
            plan_states: `KVCacheManager.plan_states`, of a model with recurrent layers.
        """
        rows = self._running_rows
        if self._new_reqs:
            rows = np.concatenate([rows, np.fromiter(self._new_reqs, np.intp, len(self._new_reqs))])
        num_scheduled_tokens = self._num_tokens[rows]
        if not num_scheduled_tokens.all():
            is_planned = num_scheduled_tokens > 0
            rows, num_scheduled_tokens = rows[is_planned], num_scheduled_tokens[is_planned]
        self.rows = rows
        num_computed_tokens = table.starts(rows)
        lengths = table.lengths(rows)
        num_left = lengths - num_computed_tokens
        states: tuple[StateBlocks, ...] = ()
        if plan_states is not None:
            states = plan_states(rows, num_computed_tokens, num_computed_tokens + num_scheduled_tokens, lengths)
        drafts = self._drafts_of(rows) if self._drafts else None
        return SchedulerOutput(
            step=step,
            freed_rows=np.array(freed_rows, dtype=np.int32),
            new_reqs=tuple(self._new_reqs.values()),
            new_blocks=self._new_blocks,
            rows=rows.astype(np.int32),
            num_scheduled_tokens=num_scheduled_tokens,
            num_computed_tokens=num_computed_tokens,
            is_prefill=num_left > 1,
            is_sampling=num_scheduled_tokens >= num_left,
            total_num_scheduled_tokens=self.total_num_tokens,
            block_copies=block_copies,
            swap_outs=swap_outs,
            swap_ins=swap_ins,
            row_updates=row_updates,
            drafts=drafts,
            kv_transfers=kv_transfers,
            states=states,
        )

    def _drafts_of(self, rows: np.ndarray) -> DraftTokens:
        """The planned drafts in the order of the message's rows."""
        drafts = self._drafts[0]
        if len(self._drafts) > 1:
            drafts = tuple(np.concatenate(parts) for parts in zip(*self._drafts, strict=True))
        if len(rows) == 1:
            return DraftTokens(np.array([len(drafts[1])], dtype=np.int32), drafts[1], tuple(drafts[2:]))
        places = np.empty(len(self._num_tokens), dtype=np.intp)
        places[rows] = np.arange(len(rows))
        of_drafts = places[drafts[0]]
        counts = np.bincount(of_drafts, minlength=len(rows)).astype(np.int32)
        if (of_drafts[1:] < of_drafts[:-1]).any():
            order = np.argsort(of_drafts, kind="stable")
            drafts = tuple(part[order] for part in drafts)
        return DraftTokens(counts, drafts[1], tuple(drafts[2:]))

    def num_first_tokens(self, output: SchedulerOutput, table: RequestTable) -> int:
        """How many of the tokens that the frozen plan samples end a prompt."""
        if output.total_num_scheduled_tokens == len(output.rows) and not output.new_reqs:
            return 0  # every row decodes, nearly always
        rows = output.rows[output.is_sampling]
        return int(np.count_nonzero(table.lengths(rows) == table.num_prompt_tokens[rows]))
