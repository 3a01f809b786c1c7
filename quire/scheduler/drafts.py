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

from quire.core.drafts import (
    DraftController,
    DraftProposer,
    DraftRows,
    Proposals,
    SpeculatedStep,
    StepLoad,
    most_drafts,
)
from quire.core.engine_messages import EngineCoreRequest
from quire.core.runner_output import ModelRunnerOutput
from quire.core.scheduler_output import SchedulerOutput
from quire.kv_cache.manager import KVCacheManager
from quire.scheduler.draft_looks import MOST_ROWS, DraftLooks
from quire.scheduler.request_table import RequestTable, RowFlag
from quire.scheduler.step_plan import StepPlan

# np.count_nonzero takes a third of the time of any() and all(): most of what arrays of a few rows cost.

# Time between two steps counts for so many times what is usual at most; weight of the newest in that.
MOST_TIMES_BETWEEN, BETWEEN_SHARE = 2.0, 1 / 8
# A step that the controller is not asked about counts for so many times the mean of those before it at most.
MOST_TIMES_MEAN = 4.0

_NO_ROWS = np.empty(0, dtype=np.intp)
_IS_BEAM = int(RowFlag.BEAM)


@dataclass(slots=True)
class _Drafted:
    """A step that has decoding rows: what was proposed for it, until it is taken in.

    Attributes:
        rows: [num_rows] intp; those of `proposals`.
        between_s: from when the step before it was taken in (and recorded, if it was plain) until drafting began:
            outputs, new requests and scheduling; None = the step before it was still under way.
        planned_s: when it was planned.
    """

    load: StepLoad
    rows: np.ndarray
    between_s: float | None
    proposals: Proposals | None = None
    proposing_s: float = 0.0
    planned_s: float = 0.0


class Drafts:
    """Adds draft tokens to plans.

    Args:
        proposer: None = there are never any.
        controller: says how many are verified; None = all that are proposed and find room. Times are on its clock, not
            the scheduler's, whose readings are recorded.
        max_step_drafts: as in `SchedulerSetup`.
    """

    def __init__(
        self,
        proposer: DraftProposer | None,
        controller: DraftController | None,
        table: RequestTable,
        kv: KVCacheManager,
        max_step_drafts: int | None = None,
    ) -> None:
        # Methods, not objects: a recording of the scheduler's state leaves functions out.
        self._begin = None if proposer is None else proposer.begin
        self._propose = None if proposer is None else proposer.propose
        self._end = None if proposer is None else proposer.end
        self._most_tokens = None if controller is None else controller.most_tokens
        self._choose = None if controller is None else controller.choose
        self._record = None if controller is None else controller.record
        self._num_skipped = None if controller is None else controller.num_skipped
        self._record_skipped = None if controller is None else controller.record_skipped
        self._num_watched = None if controller is None else controller.num_watched
        looks = None
        if proposer is not None and controller is not None:
            looks = DraftLooks(table, proposer.propose, controller.observe)
        self._look = None if looks is None else looks.look
        self._settle_looks = None if looks is None else looks.settle
        self._table = table
        self._kv = kv
        self._clock = time.perf_counter if controller is None else controller.clock
        self._most_drafts = most_drafts(len(table.num_tokens), max_step_drafts)
        self._drafted: dict[int, _Drafted | None] = {}  # None = the controller was not asked
        self._num_to_skip = self._num_tokens_skipped = self._num_to_repeat = 0
        self._num_taken, self._taken_s = 0, 0.0
        self._newest_taken, self._newest_taken_s = -1, 0.0
        self._usual_between_s: float | None = None
        self._usual_beside_s = 0.0

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
        if self._num_to_skip and plan.total_num_tokens == self._num_tokens_skipped:
            self._num_to_skip -= 1
            self._drafted[number] = None
            return
        start = self._clock()
        decoding = self._decoding(plan, rows)
        if not len(decoding):
            return
        table = self._table
        num_tokens = table.num_tokens[decoding]
        load = StepLoad(
            num_decoding=len(decoding), num_other_tokens=plan.total_num_tokens - len(decoding),
            sum_seq_lens=int(num_tokens.sum()), max_seq_len=int(num_tokens.max()),
            num_left=min(plan.budget.num_left, self._most_drafts),
        )  # fmt: skip
        most = load.num_left
        # Not below 0: the clock may be the thread's, and another one may run this step.
        between_s = max(0.0, start - self._newest_taken_s) if self._newest_taken == number - 1 else None
        drafted = self._drafted[number] = _Drafted(load, _NO_ROWS, between_s)
        if self._most_tokens is not None and most:
            most = min(most, self._ask_controller(self._most_tokens, load))
        is_asked = most > 0
        if is_asked:
            self._ask(self._propose, drafted, decoding, most)
            self._reserve(plan, drafted)
        elif self._num_watched is not None and load.num_left:
            is_asked = self._watch(load, decoding, self._num_watched() or self._num_to_repeat)
        drafted.planned_s = self._clock()
        drafted.proposing_s = drafted.planned_s - start if is_asked else 0.0

    def _ask_controller(self, most_tokens: Callable[[int, int, int], int], load: StepLoad) -> int:
        assert self._num_skipped is not None and self._record_skipped is not None, "there is a controller"
        assert self._settle_looks is not None, "there is a controller"
        if self._num_taken:
            self._record_skipped(self._num_taken, self._taken_s)
            self._num_taken, self._taken_s = 0, 0.0
        self._settle_looks()
        most = most_tokens(load.num_decoding, load.num_other_tokens, load.max_seq_len)
        self._num_to_skip, self._num_tokens_skipped = self._num_skipped(), load.num_decoding + load.num_other_tokens
        return most

    def _watch(self, load: StepLoad, decoding: np.ndarray, most: int) -> bool:
        """A plain step: look at drafts of some of its rows, if any are wanted."""
        assert self._look is not None, "there is a controller"
        asked = None if not most else self._rows_to_ask(decoding[:MOST_ROWS], most)
        if asked is None:
            return False
        is_to_repeat = not self._look(load, asked)
        self._num_to_repeat = most if is_to_repeat else 0
        self._num_to_skip = 0 if is_to_repeat else min(self._num_to_skip, most - 1)  # then it is known what came
        return True

    def _decoding(self, plan: StepPlan, rows: np.ndarray) -> np.ndarray:
        """Rows that decode, and whose newest token is known."""
        table = self._table
        decodes = (plan.num_tokens(rows) > 0) & ~table.is_prefill(rows) & ((table.flags[rows] & _IS_BEAM) == 0)
        decodes &= table.num_pending[rows] == 0  # the token before a draft is known
        decoding: np.ndarray = rows if np.count_nonzero(decodes) == len(rows) else rows[decodes]
        return decoding[[not plan.is_new(row) for row in decoding.tolist()]] if plan.has_new else decoding

    def _rows_to_ask(self, rows: np.ndarray, most: int) -> DraftRows | None:
        """Those of `rows` of which drafts may stand; None = of none."""
        table = self._table
        num_tokens = table.num_tokens[rows]
        max_tokens = np.minimum(most, table.max_total_tokens[rows] - num_tokens - 1)  # a token is sampled after drafts
        if np.count_nonzero(max_tokens < 1):
            rows, num_tokens, max_tokens = (of[max_tokens > 0] for of in (rows, num_tokens, max_tokens))
        if not len(rows):
            return None
        return DraftRows(rows, table.handle[rows], num_tokens, max_tokens.astype(np.int32), table.token_ids)

    def _ask(self, propose: Callable[[DraftRows], Proposals], drafted: _Drafted, rows: np.ndarray, most: int) -> None:
        asked = self._rows_to_ask(rows, most)
        if asked is not None:
            drafted.rows = asked.rows
            drafted.proposals = propose(asked)

    def _reserve(self, plan: StepPlan, drafted: _Drafted) -> None:
        """Plan the drafts that are chosen, as far as tokens and blocks are left."""
        proposals = drafted.proposals
        if proposals is None or not len(proposals.token_ids):
            return
        counts = proposals.counts if self._choose is None else self._choose(drafted.load, proposals)
        if int(counts.sum()) > drafted.load.num_left:
            counts = np.clip(drafted.load.num_left - (np.cumsum(counts) - counts), 0, counts)
        if not np.count_nonzero(counts):
            return
        rows, token_ids = drafted.rows, proposals.token_ids
        if len(counts) == 1:
            token_ids = token_ids[: counts[0]]
        else:
            chosen = np.flatnonzero(counts)
            rows, counts = rows[chosen], counts[chosen]
            starts = (np.cumsum(proposals.counts) - proposals.counts)[chosen]
            ends = np.cumsum(counts)
            token_ids = token_ids[np.arange(ends[-1]) + np.repeat(starts - ends + counts, counts)]
        missing = self._kv.num_missing_blocks(rows, self._table.num_tokens[rows] + counts)
        if self._kv.can_take_back and not np.count_nonzero(missing):  # nearly always: the row's last block has room
            plan.add_drafts(rows, counts, token_ids)
            return
        has_room = len(token_ids) <= self._kv.num_draft_tokens(plan.budget.num_left)
        if has_room and self._kv.has_room_for_drafts(missing, counts):
            states = self._kv.add_draft_states(rows, counts)
            plan.add_drafts(rows, counts, token_ids, self._kv.allocate(rows, missing), states)
            return
        for at, end in enumerate(np.cumsum(counts).tolist()):
            self._reserve_some(plan, rows[at : at + 1], token_ids[end - counts[at] : end])

    def _reserve_some(self, plan: StepPlan, row: np.ndarray, token_ids: np.ndarray) -> None:
        """Plan as many drafts of one row as there are tokens and blocks for the states before them."""
        token_ids = token_ids[: self._kv.num_draft_tokens(plan.budget.num_left)]
        count = np.array([len(token_ids)])
        missing = self._kv.num_missing_blocks(row, self._table.num_tokens[row] + count)
        if len(token_ids) and self._kv.has_room_for_drafts(missing, count):
            states = self._kv.add_draft_states(row, count)
            plan.add_drafts(row, count, token_ids, self._kv.allocate(row, missing), states)

    def take_back_states(self, scheduled: SchedulerOutput, rows: np.ndarray) -> None:
        """Go on from the states behind the last drafts that were accepted, of those of `rows` that had drafts."""
        if scheduled.drafts is None or self._kv.can_take_back:
            return
        drafting = rows[self._has_drafts(scheduled, rows)]
        for row, num_tokens in zip(drafting.tolist(), self._table.num_computed_tokens[drafting].tolist(), strict=True):
            self._kv.end_drafts(row, num_tokens)

    def take_in(self, scheduled: SchedulerOutput, output: ModelRunnerOutput, seconds: float | None) -> None:
        """A step was computed in so many seconds (None = not measured): say what became of its drafts."""
        if self._record is None:
            self._drafted.pop(scheduled.step, None)
            return
        has_decoding = scheduled.step in self._drafted
        drafted = self._drafted.pop(scheduled.step, None)
        if drafted is not None or not self._num_to_skip:  # else the controller is asked about neither step
            self._newest_taken, self._newest_taken_s = scheduled.step, self._clock()
        if drafted is None:
            if has_decoding and seconds is not None:
                # No clock is read for such a step: beside computing it takes what is usual.
                seconds += self._usual_beside_s
                if self._num_taken:
                    seconds = min(seconds, MOST_TIMES_MEAN * self._taken_s / self._num_taken)
                self._num_taken += 1
                self._taken_s += seconds
            return
        is_capture = seconds is None and output.is_capture
        if seconds is None and not is_capture:
            return
        seconds = self._whole_seconds(drafted, seconds)
        kept = accepted = np.zeros(len(drafted.rows), dtype=np.int32)
        if scheduled.drafts is not None:
            kept, accepted = self._outcomes(scheduled, output, drafted.rows)
        self._record(
            SpeculatedStep(
                load=drafted.load, proposals=drafted.proposals, kept=kept, accepted=accepted,
                seconds=seconds - output.drafting_s, proposing_s=drafted.proposing_s + output.drafting_s,
                is_capture=is_capture,
            )
        )  # fmt: skip
        if drafted.proposals is None:
            self._newest_taken_s = self._clock()  # plain decoding has nothing to record

    def _whole_seconds(self, drafted: _Drafted, computing_s: float | None) -> float:
        """Of a step that was just taken in, the proposer left out: from the step before it, as far as that is known.

        What is done for each step beside computing it is saved where drafts save a step, and takes longer with drafts.
        """
        step_s = self._newest_taken_s - drafted.planned_s
        if drafted.between_s is None:
            return step_s if computing_s is None else computing_s
        usual_s = self._usual_between_s
        # Where much more time went between two steps than is usual, the engine was waiting.
        between_s = min(drafted.between_s, step_s if usual_s is None else MOST_TIMES_BETWEEN * usual_s)
        self._usual_between_s = between_s if usual_s is None else usual_s + BETWEEN_SHARE * (between_s - usual_s)
        if drafted.proposals is None and computing_s is not None:
            beside_s = max(0.0, step_s + between_s - computing_s)
            self._usual_beside_s += (1.0 if usual_s is None else BETWEEN_SHARE) * (beside_s - self._usual_beside_s)
        return step_s + between_s

    def _outcomes(
        self, scheduled: SchedulerOutput, output: ModelRunnerOutput, rows: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """[num_rows] verified drafts and those that stood, of these rows of a step."""
        assert scheduled.drafts is not None, "called for steps with drafts"
        starts, counts = output.sampled_start_loc, scheduled.drafts.counts
        if starts is not None and len(counts) == len(rows) == len(output.rows) and (rows == scheduled.rows).all():
            return counts, np.maximum(starts[1:] - starts[:-1] - 1, 0)
        by_row = np.zeros((2, len(self._table.num_tokens)), dtype=np.int32)
        by_row[0, scheduled.rows] = counts
        if starts is not None:
            by_row[1, output.rows] = np.maximum(np.diff(starts) - 1, 0)
        kept, accepted = by_row[:, rows]
        return kept, accepted

    def abandon(self, scheduled: SchedulerOutput) -> None:
        """A step failed: nothing is learned from it."""
        self._drafted.pop(scheduled.step, None)

    def give_back_blocks(self, scheduled: SchedulerOutput, rows: np.ndarray) -> None:
        """Free what was reserved for drafts that were not accepted, of those of `rows` that still run."""
        if scheduled.drafts is None:
            return
        drafting = rows[self._has_drafts(scheduled, rows) & (self._table.handle[rows] >= 0)]
        self._kv.free_beyond(drafting, self._table.num_computed_tokens[drafting])

    def _has_drafts(self, scheduled: SchedulerOutput, rows: np.ndarray) -> np.ndarray:
        """[num_rows] bool: which of these rows of a step have drafts."""
        assert scheduled.drafts is not None, "called for steps with drafts"
        is_drafting: np.ndarray = scheduled.drafts.counts > 0
        if len(rows) == len(scheduled.rows):
            return is_drafting  # they are all
        by_row = np.zeros(len(self._table.num_tokens), dtype=np.bool_)
        by_row[scheduled.rows] = is_drafting
        found: np.ndarray = by_row[rows]
        return found
