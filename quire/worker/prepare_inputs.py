"""From the scheduler's message to the step's tokens: vector operations over rows, no loop over requests."""

from __future__ import annotations

import numpy as np
import torch

from quire.core.scheduler_output import DraftTokens, SchedulerOutput, StateBlocks
from quire.worker.draft_trees import make_tree_batch
from quire.worker.input_batch import InputBatch
from quire.worker.request_states import RequestStates


def prepare_inputs(
    scheduled: SchedulerOutput,
    requests: RequestStates,
    device: torch.device,
    states: tuple[StateBlocks, ...] = (),
    draft_states: tuple[np.ndarray, ...] = (),
) -> InputBatch:
    """Gather the tokens that `scheduled` wants computed; its rows, frees and additions are applied already.

    Args:
        states: as in `InputBatch`.
        draft_states: blocks for the states before each draft, [num_drafts] int32 per group.
    """
    counts = scheduled.num_scheduled_tokens
    if scheduled.total_num_scheduled_tokens == len(counts):  # a token each
        query_start_loc = np.arange(len(counts) + 1, dtype=np.int32)
        token_positions, token_rows = scheduled.num_computed_tokens.astype(np.int64), scheduled.rows
    elif len(counts) == 1:
        num_tokens, first = int(counts[0]), int(scheduled.num_computed_tokens[0])
        query_start_loc = np.array([0, num_tokens], dtype=np.int32)
        token_positions = np.arange(first, first + num_tokens, dtype=np.int64)
        token_rows = scheduled.rows.repeat(num_tokens)
    else:
        query_start_loc = np.zeros(len(counts) + 1, dtype=np.int32)
        np.cumsum(counts, out=query_start_loc[1:])
        # Position of a token = its index in the step, shifted by a constant per request.
        shifts = scheduled.num_computed_tokens - query_start_loc[:-1]
        token_positions = np.arange(query_start_loc[-1], dtype=np.int64) + np.repeat(shifts, counts)
        token_rows = scheduled.rows.repeat(counts)
    seq_lens = (scheduled.num_computed_tokens + counts).astype(np.int32)
    sampling = scheduled.is_sampling
    sampling_positions, logits_indices = seq_lens[sampling], query_start_loc[1:][sampling].astype(np.int64) - 1
    logits_start_loc = is_own_draft = trees = None
    token_state_blocks: tuple[np.ndarray, ...] = ()
    if scheduled.drafts is not None:
        if scheduled.drafts.parents is None:
            requests.write_drafts(scheduled.rows, seq_lens, scheduled.drafts)
        else:
            trees, token_positions = make_tree_batch(
                scheduled.rows, query_start_loc, scheduled.num_computed_tokens, sampling, scheduled.drafts,
                scheduled.step,
            )  # fmt: skip
        num_drafts = scheduled.drafts.counts[sampling]
        sampling_positions = sampling_positions - num_drafts
        if len(num_drafts) == 1:
            num_lines, end = 1 + int(num_drafts[0]), int(logits_indices[0]) + 1
            logits_start_loc = np.array([0, num_lines], dtype=np.int32)
            logits_indices = np.arange(end - num_lines, end)
        else:
            logits_start_loc = np.zeros(len(num_drafts) + 1, dtype=np.int32)
            np.cumsum(1 + num_drafts, out=logits_start_loc[1:])
            shifts = logits_indices - num_drafts - logits_start_loc[:-1]
            logits_indices = np.arange(logits_start_loc[-1]) + shifts.repeat(1 + num_drafts)
        if scheduled.drafts.is_of_model is not None:
            is_own_draft = scheduled.drafts.is_of_model[sampling] | (num_drafts == 0)
        token_state_blocks = _before_drafts(scheduled.drafts, query_start_loc, draft_states)
    input_ids = requests.token_ids[token_rows, token_positions]
    if trees is not None:
        input_ids[trees.draft_tokens] = trees.draft_token_ids
    return InputBatch(
        rows=scheduled.rows,
        num_computed_tokens=scheduled.num_computed_tokens,
        query_start_loc=query_start_loc,
        seq_lens=seq_lens,
        input_ids=torch.from_numpy(input_ids).to(device),
        positions=torch.from_numpy(token_positions).to(device),
        token_rows=token_rows,
        token_positions=token_positions,
        sampling_rows=scheduled.rows[sampling],
        sampling_positions=sampling_positions,
        logits_indices=logits_indices,
        logits_start_loc=logits_start_loc,
        is_own_draft=is_own_draft,
        trees=trees,
        states=states,
        token_state_blocks=token_state_blocks,
    )


def _before_drafts(
    drafts: DraftTokens, query_start_loc: np.ndarray, draft_states: tuple[np.ndarray, ...]
) -> tuple[np.ndarray, ...]:
    """`InputBatch.token_state_blocks`: each draft's block is that of the token before it."""
    if not draft_states:
        return ()
    ends = np.cumsum(drafts.counts)
    # A request's drafts are its last tokens.
    shifts = query_start_loc[1:] - 1 - ends
    tokens = np.arange(len(drafts.token_ids)) + np.repeat(shifts, drafts.counts)
    blocks = np.full((len(draft_states), query_start_loc[-1]), -1, dtype=np.int32)
    for line, ids in zip(blocks, draft_states, strict=True):
        line[tokens] = ids
    return tuple(blocks)
