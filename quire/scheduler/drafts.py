"""Drafts: guesses at the next tokens of rows that decode, which take what is left of a step's tokens and free blocks.

Called by the scheduler when everything else of a step is planned, so drafts keep no request waiting. Owns what the step
in progress was drafted for, until it is taken in: blocks reserved ahead for drafts belong to the row, and go back when
the drafts behind them are not accepted.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from quire.core.drafts import DraftController, DraftProposer, DraftRows, Proposals, SpeculatedStep, StepLoad
from quire.core.engine_messages import EngineCoreRequest
from quire.core.runner_output import ModelRunnerOutput
from quire.core.scheduler_output import SchedulerOutput
from quire.kv_cache.manager import KVCacheManager
from quire.scheduler.request_table import RequestTable, RowFlag
from quire.scheduler.step_plan import StepPlan

_NO_ROWS = np.empty(0, dtype=np.intp)
_IS_BEAM = int(RowFlag.BEAM)


@dataclass(slots=True)
class _Drafted:
    """A step that has decoding rows: what was proposed for it, until it is taken in.

    Attributes:
        rows: [num_rows] intp; those of `proposals`.
    """

    load: StepLoad
    rows: np.ndarray
    proposals: Proposals | None = None
    proposing_s: float = 0.0


class Drafts:
    """Adds draft tokens to plans.

    Args:
        proposer: None = there are never any.
        controller: says how many are verified; None = all that are proposed and find room.
        clock: seconds, for what proposing takes; not the scheduler's, whose readings are recorded.
    """

    def __init__(
        self,
        proposer: DraftProposer | None,
        controller: DraftController | None,
        table: RequestTable,
        kv: KVCacheManager,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        # Methods, not objects: a recording of the scheduler's state leaves functions out.
        self._begin = None if proposer is None else proposer.begin
        self._propose = None if proposer is None else proposer.propose
        self._end = None if proposer is None else proposer.end
        self._most_tokens = None if controller is None else controller.most_tokens
        self._choose = None if controller is None else controller.choose
        self._record = None if controller is None else controller.record
        self._table = table
        self._kv = kv
        self._clock = clock
        self._drafted: dict[int, _Drafted] = {}

    def begin(self, request: EngineCoreRequest) -> None:
        """A request arrived."""
        if self._begin is not None:
            self._begin(request)

    def end(self, handle: int, token_ids: np.ndarray, num_prompt_tokens: int) -> None:
        """A request ended; `token_ids` are its prompt and output."""
        if self._end is not None:
            self._end(handle, token_ids, num_prompt_tokens)

    def add(self, plan: StepPlan, rows: np.ndarray, number: int) -> None:
        """Draft for those of the running `rows` that decode in step `number`; of beams for none."""
        if self._propose is None:
            return
        decoding = self._decoding(plan, rows)
        if not len(decoding):
            return
        table = self._table
        num_tokens = table.num_tokens[decoding]
        load = StepLoad(
            num_decoding=len(decoding), num_other_tokens=plan.total_num_tokens - len(decoding),
            sum_seq_lens=int(num_tokens.sum()), max_seq_len=int(num_tokens.max()), num_left=plan.budget.num_left,
        )  # fmt: skip
        drafted = self._drafted[number] = _Drafted(load, _NO_ROWS)
        most = load.num_left
        if self._most_tokens is not None and most:
            most = min(most, self._most_tokens(load.num_decoding, load.num_other_tokens, load.max_seq_len))
        if most > 0:
            self._ask(self._propose, drafted, decoding, most)
            self._reserve(plan, drafted)

    def _decoding(self, plan: StepPlan, rows: np.ndarray) -> np.ndarray:
        """Rows that decode, and whose newest token is known."""
        table = self._table
        decodes = (plan.num_tokens(rows) > 0) & ~table.is_prefill(rows) & ((table.flags[rows] & _IS_BEAM) == 0)
        decodes &= table.num_pending[rows] == 0  # the token before a draft is known
        decoding: np.ndarray = rows[decodes]
        return decoding[[not plan.is_new(row) for row in decoding.tolist()]]

    def _ask(self, propose: Callable[[DraftRows], Proposals], drafted: _Drafted, rows: np.ndarray, most: int) -> None:
        table = self._table
        num_tokens = table.num_tokens[rows]
        max_tokens = np.minimum(most, table.max_total_tokens[rows] - num_tokens - 1)  # a token is sampled after drafts
        rows, num_tokens, max_tokens = (of[max_tokens > 0] for of in (rows, num_tokens, max_tokens))
        if not len(rows):
            return
        start = self._clock()
        drafted.rows = rows
        drafted.proposals = propose(
            DraftRows(rows, table.handle[rows], num_tokens, max_tokens.astype(np.int32), table.token_ids)
        )
        drafted.proposing_s = self._clock() - start

    def _reserve(self, plan: StepPlan, drafted: _Drafted) -> None:
        """Plan the drafts that are chosen, as far as tokens and blocks are left."""
        proposals = drafted.proposals
        if proposals is None or not len(proposals.token_ids):
            return
        counts = proposals.counts if self._choose is None else self._choose(drafted.load, proposals)
        starts = np.cumsum(proposals.counts) - proposals.counts
        for entry in np.flatnonzero(counts).tolist():
            row, start = int(drafted.rows[entry]), int(starts[entry])
            most = self._kv.num_draft_tokens(plan.budget.num_left)
            drafts = proposals.token_ids[start : start + min(int(counts[entry]), most)]
            if not len(drafts):
                return
            at = np.array([row], dtype=np.intp)
            missing = self._kv.num_missing_blocks(at, self._table.num_tokens[at] + len(drafts))
            if self._kv.has_room_for_drafts(missing, np.array([len(drafts)])):
                states = self._kv.add_draft_states(row, len(drafts))
                plan.add_drafts(row, drafts, self._kv.allocate(at, missing), states)

    def take_back_states(self, scheduled: SchedulerOutput, rows: np.ndarray) -> None:
        """Go on from the states behind the last drafts that were accepted, of those of `rows` that had drafts."""
        if scheduled.drafts is None or self._kv.can_take_back:
            return
        drafting = rows[np.isin(rows, scheduled.rows[scheduled.drafts.counts > 0])]
        for row, num_tokens in zip(drafting.tolist(), self._table.num_computed_tokens[drafting].tolist(), strict=True):
            self._kv.end_drafts(row, num_tokens)

    def take_in(self, scheduled: SchedulerOutput, output: ModelRunnerOutput, seconds: float | None) -> None:
        """A step was computed in so many seconds (None = not measured): say what became of its drafts."""
        drafted = self._drafted.pop(scheduled.step, None)
        if drafted is None or self._record is None or seconds is None:
            return
        kept = accepted = np.zeros(len(drafted.rows), dtype=np.int32)
        if scheduled.drafts is not None:
            kept, accepted = self._outcomes(scheduled, output, drafted.rows)
        self._record(
            SpeculatedStep(
                load=drafted.load, proposals=drafted.proposals, kept=kept, accepted=accepted, seconds=seconds,
                proposing_s=drafted.proposing_s,
            )
        )  # fmt: skip

    def _outcomes(
        self, scheduled: SchedulerOutput, output: ModelRunnerOutput, rows: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """[num_rows] verified drafts and those that stood, of these rows of a step."""
        assert scheduled.drafts is not None, "called for steps with drafts"
        by_row = np.zeros((2, len(self._table.num_tokens)), dtype=np.int32)
        by_row[0, scheduled.rows] = scheduled.drafts.counts
        if output.sampled_start_loc is not None:
            by_row[1, output.rows] = np.maximum(np.diff(output.sampled_start_loc) - 1, 0)
        kept, accepted = by_row[:, rows]
        return kept, accepted

    def abandon(self, scheduled: SchedulerOutput) -> None:
        """A step failed: nothing is learned from it."""
        self._drafted.pop(scheduled.step, None)

    def give_back_blocks(self, scheduled: SchedulerOutput, rows: np.ndarray) -> None:
        """Free what was reserved for drafts that were not accepted, of those of `rows` that still run."""
        if scheduled.drafts is None:
            return
        drafting = rows[np.isin(rows, scheduled.rows[scheduled.drafts.counts > 0]) & (self._table.handle[rows] >= 0)]
        for row, num_tokens in zip(drafting.tolist(), self._table.num_computed_tokens[drafting].tolist(), strict=True):
            self._kv.free_beyond(row, num_tokens)
