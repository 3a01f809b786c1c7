"""What of a step's results still counts: requests that ended while the step ran take nothing from it.

Called by the scheduler's update. Functions without state.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from quire.core.logprobs import LogprobsArrays
from quire.core.request import Request
from quire.core.runner_output import ModelRunnerOutput
from quire.core.scheduler_output import SchedulerOutput
from quire.scheduler.request_table import RequestTable


@dataclass(frozen=True, slots=True)
class Sampled:
    """New tokens of rows that still run.

    Attributes:
        rows: [num_sampled] intp.
        token_ids: [num_sampled] int32.
        logprobs: `index` refers to entries of `rows`.
    """

    rows: np.ndarray
    token_ids: np.ndarray
    logprobs: LogprobsArrays | None


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
    return select_sampled(Sampled(rows, output.sampled_token_ids, output.logprobs), is_alive)


def select_sampled(sampled: Sampled, is_kept: np.ndarray) -> Sampled:
    """Some of the entries of `sampled`; `is_kept` is [num_sampled] bool."""
    if is_kept.all():
        return sampled
    logprobs = None if sampled.logprobs is None else _keep_logprobs(sampled.logprobs, is_kept)
    return Sampled(sampled.rows[is_kept], sampled.token_ids[is_kept], logprobs)


def _keep_logprobs(logprobs: LogprobsArrays, is_kept: np.ndarray) -> LogprobsArrays:
    """Lines of kept entries, renumbered to where those entries are now."""
    lines = is_kept[logprobs.index]
    new_index = (np.cumsum(is_kept) - 1).astype(np.int32)
    return LogprobsArrays(
        index=new_index[logprobs.index[lines]],
        token_ids=logprobs.token_ids[lines],
        logprobs=logprobs.logprobs[lines],
        ranks=logprobs.ranks[lines],
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
