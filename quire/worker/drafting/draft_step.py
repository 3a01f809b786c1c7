"""DraftStep: the third part of a step, where a model drafts behind the tokens that were sampled.

Called by the model runner after sampling, where the step asks for it. Holds references; what a drafting model keeps is
its own.
"""

from __future__ import annotations

import numpy as np
import torch

from quire.core.model_drafts import DraftRequest, RowDrafts
from quire.core.runner_output import ModelRunnerOutput
from quire.core.scheduler_output import SchedulerOutput
from quire.worker.drafting.inputs import DraftInputs, DraftModel
from quire.worker.input_batch import InputBatch
from quire.worker.request_states import RequestStates


class DraftStep:
    """Asks a drafting model.

    Args:
        block_size: tokens per block.
    """

    def __init__(self, model: DraftModel, requests: RequestStates, block_size: int) -> None:
        self._model = model
        self._requests = requests
        self._block_size = block_size

    def apply(self, scheduled: SchedulerOutput) -> None:
        """As `DraftModel.apply`."""
        self._model.apply(scheduled)

    def reads_all_states(self, scheduled: SchedulerOutput) -> bool:
        """Whether drafting behind this step reads hidden states of tokens that predict none."""
        return scheduled.draft_request is not None and self._model.reads_all_states

    def run(
        self,
        batch: InputBatch,
        hidden: torch.Tensor,
        output: ModelRunnerOutput,
        request: DraftRequest,
        step_lines: np.ndarray | None = None,
    ) -> RowDrafts:
        """Drafts behind the tokens that `output` has for the rows asked for.

        Args:
            hidden: of the step.
            step_lines: [batch.num_tokens] int64; which tokens of the step the batch has; None = all.
        """
        if step_lines is not None:
            hidden = hidden[torch.from_numpy(step_lines).to(hidden.device)]
        inputs = gather_inputs(batch, hidden, output, self._requests, request, self._block_size, step_lines)
        drafts = self._model.propose(inputs)
        return RowDrafts(
            inputs.rows.astype(np.int32),
            inputs.num_tokens,
            drafts.counts,
            drafts.token_ids,
            drafts.scores,
            drafts.parents,
        )


def gather_inputs(
    batch: InputBatch,
    hidden: torch.Tensor,
    output: ModelRunnerOutput,
    requests: RequestStates,
    request: DraftRequest,
    block_size: int,
    step_lines: np.ndarray | None = None,
) -> DraftInputs:
    """The inputs for those of the rows asked for that got a token in the step, in the order of the batch.

    Args:
        hidden, step_lines: as of `DraftInputs`.
        block_size: tokens per block: so far as they are filled up, the step's blocks have room for drafts.
    """
    num_sampling = len(output.rows)
    starts = output.sampled_start_loc
    counts = np.ones(num_sampling, dtype=np.int32) if starts is None else starts[1:] - starts[:-1]
    num_dropped = 1 - counts
    if batch.logits_start_loc is not None:
        num_dropped = batch.logits_start_loc[1:] - batch.logits_start_loc[:-1] - counts
    asked, max_tokens = _asked(output, counts, request)
    at = asked  # rows that sample keep the batch's order
    if num_sampling < batch.num_reqs:
        at = np.flatnonzero(np.isin(batch.rows, output.rows))[asked]
    rows, counts, num_dropped = output.rows[asked], counts[asked], num_dropped[asked]
    begins, ends = batch.query_start_loc[:-1][at], batch.query_start_loc[1:][at]
    return DraftInputs(
        rows=rows.astype(np.intp),
        num_tokens=(batch.sampling_positions[asked] + counts).astype(np.int32),
        max_tokens=max_tokens,
        num_slots=-(-batch.seq_lens[at] // block_size) * block_size,
        token_ids=requests.token_ids,
        hidden=hidden,
        hidden_ends=(ends - num_dropped).astype(np.int64),
        hidden_counts=(ends - begins - num_dropped).astype(np.int32),
        step_lines=step_lines,
    )


def _asked(
    output: ModelRunnerOutput, counts: np.ndarray, request: DraftRequest
) -> tuple[np.ndarray | slice, np.ndarray]:
    """Which entries of `output.rows` are asked for and got a token ([n] intp), and most drafts of each ([n] int32)."""
    is_asked = counts > 0
    if output.errors:
        is_asked &= ~np.isin(output.rows, list(output.errors))
    is_of_all = len(output.rows) == len(request.rows) and not np.count_nonzero(output.rows != request.rows)
    if is_of_all:  # as a step asks that has no prompt unfinished
        if np.count_nonzero(is_asked) == len(is_asked):
            return slice(None), request.max_tokens
        return np.flatnonzero(is_asked), request.max_tokens[is_asked]
    asked = np.flatnonzero(is_asked & np.isin(output.rows, request.rows))
    order = np.argsort(request.rows)
    return asked, request.max_tokens[order[np.searchsorted(request.rows[order], output.rows[asked])]]
