"""What of a step's results still counts: requests that ended while the step ran take nothing from it.

Called by the scheduler's update. Functions without state. Nearly always each row that samples gets one token. Where
some get none or several, the tokens are taken in by turns: the first of every row, then the second, ...; so each turn
is such a step, and a row that ends in one takes no part in those after it. Where no token ends a request, all are taken
in at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from quire.core.logprobs import LogprobsArrays
from quire.core.request import Request
from quire.core.runner_output import ModelRunnerOutput
from quire.core.scheduler_output import SchedulerOutput
from quire.scheduler.request_table import RequestTable
from quire.scheduler.stop import Stop, find_stops, may_stop


@dataclass(frozen=True, slots=True)
class Sampled:
    """New tokens of rows that still run.

    Attributes:
        rows: [num_sampled] intp; distinct, or each repeated for its tokens.
        token_ids: [num_sampled] int32.
        logprobs: `index` refers to entries of `rows`.
        turns: [num_sampled] int; how many tokens of its row come before each; None = none, the rows are distinct.
    """

    rows: np.ndarray
    token_ids: np.ndarray
    logprobs: LogprobsArrays | None
    turns: np.ndarray | None = None


def keep_alive(
    scheduled: SchedulerOutput, rows: np.ndarray, output: ModelRunnerOutput, is_alive: np.ndarray
) -> Sampled:
    """The step's samples without those of rows that are no longer alive.

    Args:
        rows: [num_reqs] intp; those of `scheduled`.
        is_alive: [num_reqs] bool.
    """
    if not scheduled.is_sampling.all():
        rows, is_alive = rows[scheduled.is_sampling], is_alive[scheduled.is_sampling]
    is_answered = len(rows) == len(output.rows) and (rows == output.rows).all()
    assert is_answered, "the worker must return exactly the rows that sample"
    starts, turns = output.sampled_start_loc, None
    if starts is not None:
        counts = starts[1:] - starts[:-1]
        assert (counts <= scheduled.num_logits()).all(), "a row of logits gives at most one token"
        turns = np.arange(starts[-1])
        if len(rows) > 1:
            turns -= starts[:-1].repeat(counts)
        rows, is_alive = rows.repeat(counts), is_alive.repeat(counts)
    return select_sampled(Sampled(rows, output.sampled_token_ids, output.logprobs, turns), is_alive)


def num_kept_tokens(scheduled: SchedulerOutput, output: ModelRunnerOutput) -> np.ndarray:
    """[num_reqs] tokens of each row whose keys and values stay: those behind drafts that were not accepted do not.

    A row that samples has then computed all its tokens but the newest.
    """
    if output.sampled_start_loc is None and scheduled.drafts is None:
        return scheduled.num_scheduled_tokens
    num_logits = scheduled.num_logits()
    starts = output.sampled_start_loc
    counts = np.ones_like(num_logits) if starts is None else starts[1:] - starts[:-1]
    num_kept: np.ndarray = scheduled.num_scheduled_tokens.copy()
    num_kept[scheduled.is_sampling] += (counts - num_logits).astype(num_kept.dtype)
    return num_kept


def take_in_turns(
    sampled: Sampled, table: RequestTable, append: Callable[[np.ndarray, np.ndarray, np.ndarray | None], None]
) -> tuple[Sampled, list[Stop]]:
    """Append the tokens, each row's up to the one with which its request ends.

    Args:
        append: takes in tokens of some rows, as `RequestTable.append_tokens`.

    Returns:
        The tokens that were appended, and the ends among them. Of rows that end no more tokens count as computed.
    """
    if sampled.turns is None:
        append(sampled.rows, sampled.token_ids, None)
        return sampled, find_stops(table, sampled.rows, sampled.token_ids)
    if not may_stop(table, sampled.rows, sampled.token_ids, sampled.turns):
        append(sampled.rows, sampled.token_ids, sampled.turns)
        return sampled, []
    is_kept, stops = np.ones(len(sampled.rows), dtype=np.bool_), list[Stop]()
    for turn in range(int(sampled.turns.max(initial=-1)) + 1):
        at = np.flatnonzero(is_kept & (sampled.turns == turn))
        append(sampled.rows[at], sampled.token_ids[at], None)
        for stop in find_stops(table, sampled.rows[at], sampled.token_ids[at]):
            is_late = (sampled.rows == stop.row) & (sampled.turns > turn)
            table.num_computed_tokens[stop.row] -= np.count_nonzero(is_late)
            is_kept &= ~is_late
            stops.append(stop)
    return select_sampled(sampled, is_kept), stops


def select_sampled(sampled: Sampled, is_kept: np.ndarray) -> Sampled:
    """Some of the entries of `sampled`; `is_kept` is [num_sampled] bool."""
    if is_kept.all():
        return sampled
    return Sampled(
        sampled.rows[is_kept],
        sampled.token_ids[is_kept],
        None if sampled.logprobs is None else sampled.logprobs.select(is_kept),
        None if sampled.turns is None else sampled.turns[is_kept],
    )


def take_prompt_logprobs(
    output: ModelRunnerOutput, rows: np.ndarray, table: RequestTable
) -> tuple[tuple[int, LogprobsArrays], ...]:
    """(handle, lines) of those of `rows`, which are alive, with prompt positions that did not go out yet."""
    if not output.prompt_logprobs:
        return ()
    taken = []
    for row in rows[np.isin(rows, list(output.prompt_logprobs))].tolist():
        request = table.request_on(row)
        lines = _take_unsent(request, output.prompt_logprobs[row])
        if lines is not None:
            taken.append((request.handle, lines))
    return tuple(taken)


def _take_unsent(request: Request, lines: LogprobsArrays) -> LogprobsArrays | None:
    """Lines of prompt positions that did not go out before the request was preempted; None when all did."""
    is_new = lines.index >= request.num_prompt_logprobs_sent
    if not is_new.any():
        return None
    request.num_prompt_logprobs_sent = int(lines.index[-1]) + 1
    return LogprobsArrays(
        index=lines.index[is_new],
        token_ids=lines.token_ids[is_new],
        logprobs=lines.logprobs[is_new],
        ranks=lines.ranks[is_new],
    )
