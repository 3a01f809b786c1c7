"""What a drafting model is given after a step was sampled, and what it gives: `DraftModel` and its values.

`gather_inputs` makes them from a step's batch and output. No state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch

from quire.core.runner_output import ModelRunnerOutput
from quire.core.scheduler_output import SchedulerOutput
from quire.worker.input_batch import InputBatch
from quire.worker.request_states import RequestStates


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftInputs:
    """What a drafting model may look at.

    Attributes:
        rows: [n] intp, distinct.
        num_tokens: [n] int32; tokens of each row, the newest included, whose keys and values are not computed.
        max_tokens: [n] int32, at least 1; most drafts of each.
        num_slots: [n] int32; for how many tokens the row has blocks.
        token_ids: [max_num_seqs, .] int32; tokens of every row, not to be written.
        hidden: [num_tokens of the step, hidden_size] of the target.
        hidden_ends: [n] int64; hidden[hidden_ends - 1] is that of each row's token before the newest.
        hidden_counts: [n] int32; so many of its tokens, the last of which is that one, were computed in this step.
    """

    rows: np.ndarray
    num_tokens: np.ndarray
    max_tokens: np.ndarray
    num_slots: np.ndarray
    token_ids: np.ndarray
    hidden: torch.Tensor
    hidden_ends: np.ndarray
    hidden_counts: np.ndarray


class ModelDrafts(NamedTuple):
    """Drafts of rows, in their order: counts [n] int32, then of all drafts ids (int32) and probabilities (float32)."""

    counts: np.ndarray
    token_ids: np.ndarray
    scores: np.ndarray


class DraftModel(Protocol):
    """Drafts on the worker's side: a second model, or heads on the target's hidden states."""

    def apply(self, scheduled: SchedulerOutput) -> None:
        """Take in what a message does to rows and blocks; called in every step, once the tables have it."""
        ...

    def propose(self, inputs: DraftInputs) -> ModelDrafts:
        """Guesses for these rows; called after a step was sampled, not in every step."""
        ...


def gather_inputs(
    batch: InputBatch,
    hidden: torch.Tensor,
    output: ModelRunnerOutput,
    requests: RequestStates,
    rows: np.ndarray,
    max_tokens: np.ndarray,
    block_size: int,
) -> DraftInputs:
    """The inputs for those of `rows` ([m]) that got a token in the step, in the order of the batch.

    Args:
        hidden: of the step.
        max_tokens: [m] int32; most drafts of each of `rows`.
        block_size: tokens per block: so far as they are filled up, the step's blocks have room for drafts.
    """
    counts = np.ones(len(output.rows), dtype=np.int32)
    if output.sampled_start_loc is not None:
        counts = np.diff(output.sampled_start_loc)
    num_logits = np.ones_like(counts) if batch.logits_start_loc is None else np.diff(batch.logits_start_loc)
    is_asked = np.isin(output.rows, rows) & ~np.isin(output.rows, list(output.errors)) & (counts > 0)
    at = np.flatnonzero(np.isin(batch.rows, output.rows))[is_asked]  # rows that sample keep the batch's order
    num_dropped, sampled = (num_logits - counts)[is_asked], output.rows[is_asked].astype(np.intp)
    order = np.argsort(rows)
    return DraftInputs(
        rows=sampled,
        num_tokens=(batch.sampling_positions + counts)[is_asked].astype(np.int32),
        max_tokens=max_tokens[order[np.searchsorted(rows[order], sampled)]],
        num_slots=-(-batch.seq_lens[at] // block_size) * block_size,
        token_ids=requests.token_ids,
        hidden=hidden,
        hidden_ends=(batch.query_start_loc[1:][at] - num_dropped).astype(np.int64),
        hidden_counts=(np.diff(batch.query_start_loc)[at] - num_dropped).astype(np.int32),
    )
