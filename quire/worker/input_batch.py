"""InputBatch: the tokens of one step, gathered from the rows. Made by `prepare_inputs`, read until the step ends."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from quire.core.scheduler_output import StateBlocks


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeBatch:
    """How the tokens of a step lie in trees (`worker.draft_trees`). Each request without a tree is one segment.

    Attributes:
        parents: [num_tokens] int64; the step's token that each token follows; -1 = it was computed earlier.
        draft_tokens, draft_token_ids: [num_drafts]; which of the step's tokens are drafts, and what they are.
        line_tokens: [num_logits] int64; as `InputBatch.logits_indices`.
        line_parents: [num_logits] int64; the row of logits behind which each one's token stands; -1 = the row's first.
        line_token_ids: [num_logits] int32; that token.
        rows: [num_segments] int32.
        start_loc: [num_segments + 1] int32; the step's tokens of each.
        seq_lens: [num_segments] int32; tokens up to its last one, along its path.
        is_first: [num_segments] bool; the row's first one, which lies in the row's own blocks.
        bases: [num_segments] int64; position of the row's newest token.
        step: number of the step.
    """

    parents: np.ndarray
    draft_tokens: np.ndarray
    draft_token_ids: np.ndarray
    line_tokens: np.ndarray
    line_parents: np.ndarray
    line_token_ids: np.ndarray
    rows: np.ndarray
    start_loc: np.ndarray
    seq_lens: np.ndarray
    is_first: np.ndarray
    bases: np.ndarray
    step: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class InputBatch:
    """One step's inputs. Request i of the batch owns tokens query_start_loc[i] .. query_start_loc[i + 1] - 1.

    Attributes:
        rows: [num_reqs] int32; the row of each request.
        num_computed_tokens: [num_reqs] int32; tokens cached before this step.
        query_start_loc: [num_reqs + 1] int32.
        seq_lens: [num_reqs] int32; tokens cached after this step.
        input_ids: [num_tokens] int32, on the device.
        positions: [num_tokens] int64, on the device.
        token_rows, token_positions: [num_tokens]; row and position of each token, on the host.
        sampling_rows: [num_sampled] int32; rows that get a token, in the order of the batch.
        sampling_positions: [num_sampled] int32; index in its sequence of each token to be sampled, or of a row's first.
        logits_indices: [num_logits] int64; the step's tokens whose hidden states predict tokens.
        logits_start_loc: [num_sampled + 1] int32; where each row's rows of logits begin: it has one, and one for each
            draft. None = one each.
        is_own_draft: [num_sampled] bool; rows whose drafts, if any, are those of the worker's own model. None = all,
            or not known.
        trees: where some row's drafts are a tree. Tokens then stand at `token_positions`, whatever `seq_lens` says.
        states: blocks of recurrent layers, for each KV cache group that has such, numbered within their pools.
        token_state_blocks: for each such group [num_tokens] int32; a block for the state after each token of the step
            that stands before a draft; -1 = none. Empty = no row has drafts.
    """

    rows: np.ndarray
    num_computed_tokens: np.ndarray
    query_start_loc: np.ndarray
    seq_lens: np.ndarray
    input_ids: torch.Tensor
    positions: torch.Tensor
    token_rows: np.ndarray
    token_positions: np.ndarray
    sampling_rows: np.ndarray
    sampling_positions: np.ndarray
    logits_indices: np.ndarray
    logits_start_loc: np.ndarray | None = None
    is_own_draft: np.ndarray | None = None
    trees: TreeBatch | None = None
    states: tuple[StateBlocks, ...] = ()
    token_state_blocks: tuple[np.ndarray, ...] = ()

    @property
    def num_reqs(self) -> int:
        """Requests in the step."""
        return len(self.rows)

    @property
    def num_tokens(self) -> int:
        """Tokens in the step."""
        return len(self.token_rows)
