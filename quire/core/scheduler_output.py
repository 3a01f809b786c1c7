"""The scheduler's decision for one step: the only message that crosses from control plane to data plane.

Made by `Scheduler.schedule`, read by `ModelRunner`. Rows are the fixed row numbers of admitted requests;
both sides use the same ones. Arrays are not to be written after the message is made.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from quire.core.kv_transfer import KVTransferMeta
from quire.core.model_drafts import DraftRequest
from quire.core.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRequestData:
    """A request placed on a row in this step: first admission, or return after preemption.

    Attributes:
        row: the row it owns until it appears in `freed_rows`.
        request_id: for logs and errors.
        token_ids: [num_tokens] int32; the prompt, then all output tokens sampled so far.
        num_prompt_tokens: how many of `token_ids` are prompt.
        sampling_params: normalised; `max_tokens` is a number.
        seed: 64-bit key of the request's random numbers (never None: unseeded requests were given one).
        eos_token_id: masked by `min_tokens`, together with the stop ids; -1 = none.
        block_ids: per KV cache group: [num_blocks] int32; blocks 0.. of the request, cached ones included; of recurrent
            layers the one that is written.
    """

    row: int
    request_id: str
    token_ids: np.ndarray
    num_prompt_tokens: int
    sampling_params: SamplingParams
    seed: int
    eos_token_id: int
    block_ids: tuple[np.ndarray, ...]


@dataclass(frozen=True, slots=True)
class NewBlocks:
    """Blocks appended to running rows in this step, for one KV cache group: table[rows, columns] = block_ids.

    All three are [num_new_blocks] int32.
    """

    rows: np.ndarray
    columns: np.ndarray
    block_ids: np.ndarray

    def followed_by(self, others: NewBlocks) -> NewBlocks:
        """These blocks and those that were appended after them."""
        if not len(others.rows):
            return self
        return NewBlocks(
            np.concatenate([self.rows, others.rows]),
            np.concatenate([self.columns, others.columns]),
            np.concatenate([self.block_ids, others.block_ids]),
        )


@dataclass(frozen=True, slots=True)
class BlockCopies:
    """Blocks to be copied onto others, in every layer. Both are [num_copies] int32; no target is a source."""

    source_ids: np.ndarray
    target_ids: np.ndarray

    def __len__(self) -> int:
        return len(self.source_ids)


@dataclass(frozen=True, slots=True)
class StateBlocks:
    """Where the recurrent states of a step's requests are, for one KV cache group. Both are [num_reqs] int32.

    Attributes:
        read_block_ids: the state before the request's first token of the step; -1 = it begins anew. Not to be written,
            unless it is the same in `write_block_ids`.
        write_block_ids: for the state after its last token of the step; distinct.
    """

    read_block_ids: np.ndarray
    write_block_ids: np.ndarray


_NO_IDS = np.empty(0, dtype=np.int32)
NO_BLOCK_COPIES = BlockCopies(_NO_IDS, _NO_IDS)


@dataclass(frozen=True, slots=True)
class RowFork:
    """A row that becomes what another one is: its first `num_tokens` tokens; `block_ids` as in `NewRequestData`."""

    row: int
    source_row: int
    num_tokens: int
    block_ids: tuple[np.ndarray, ...]


@dataclass(frozen=True, slots=True)
class ForcedTokens:
    """Tokens that stand in place of sampled ones: [n] distinct rows, the token's index in its sequence, its id."""

    rows: np.ndarray
    positions: np.ndarray
    token_ids: np.ndarray


@dataclass(frozen=True, slots=True)
class RowUpdates:
    """What beam searches did to rows since the last message; first `forks`, then `chosen`."""

    forks: tuple[RowFork, ...] = ()
    chosen: tuple[ForcedTokens, ...] = ()


NO_ROW_UPDATES = RowUpdates()


@dataclass(frozen=True, slots=True)
class DraftTokens:
    """Guesses at what rows will sample, computed behind their newest token in the same step.

    Attributes:
        counts: [num_reqs] int32; how many of the row's scheduled tokens, the last ones, are drafts; 0 = none.
        token_ids: [sum of counts] int32; in the order of the batch.
        state_block_ids: for each KV cache group of recurrent layers: [sum of counts] int32; blocks for the state before
            each draft, from which the row goes on if that draft is wrong.
        parents: [sum of counts] int32; of trees (`core.draft_trees`): which of its row's drafts each follows, -1 = the
            newest token, in depth-first order. None = each follows the one before it.
        is_of_model: [num_reqs] bool; rows whose drafts are those of the worker's own model. None = all, or not known.
    """

    counts: np.ndarray
    token_ids: np.ndarray
    state_block_ids: tuple[np.ndarray, ...] = ()
    parents: np.ndarray | None = None
    is_of_model: np.ndarray | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerOutput:
    """What one step runs.

    Example: row 4 decodes (10 tokens, 9 of them computed) with 2 drafts, row 7 computes 5 tokens of its prompt of 20:

        rows                 [4, 7]
        num_scheduled_tokens [3, 5]       total_num_scheduled_tokens 8
        num_computed_tokens  [9, 0]
        is_prefill           [no, yes]
        is_sampling          [yes, no]    three rows of logits for row 4: it gets one, two or three tokens
        drafts.counts        [2, 0]

    The receiver applies `row_updates`, then `freed_rows`, then `swap_outs`, then `swap_ins`, then `new_reqs`, then
    `new_blocks`, then `block_copies`, then computes the tokens. So a block may be swapped out, given to another request
    and written in one step.

    Attributes:
        step: number of the step, from 0.
        freed_rows: [.] int32; rows whose request finished, was aborted or preempted since the last message.
        new_reqs: requests placed on rows.
        new_blocks: per KV cache group, blocks appended to rows that were already placed.
        rows: [num_reqs] int32; rows that compute in this step, in the order of the batch, distinct.
        num_scheduled_tokens: [num_reqs] int32, each >= 1.
        num_computed_tokens: [num_reqs] int32; tokens whose KV is in the cache before this step.
        is_prefill: [num_reqs] bool; several of the row's tokens, drafts aside, were not computed before this step, as
            of a new or resumed request; False = it decodes: its newest token alone was left.
        is_sampling: [num_reqs] bool; the row's newest token is scheduled, so a token is sampled, and after each draft
            that is what was sampled one more.
        total_num_scheduled_tokens: sum of `num_scheduled_tokens`.
        block_copies: partly filled blocks that a request takes over from another one and is about to write to.
        swap_outs: blocks of the cache, copied to blocks of the swap space.
        swap_ins: blocks of the swap space, copied to blocks of the cache.
        row_updates: rows of beam searches that took over others.
        drafts: draft tokens; None = no row has any.
        kv_transfers: blocks loaded from tiers behind the cache, and saved to them, after `swap_ins`; None = none are.
        states: for each KV cache group of recurrent layers, in the order of the groups; empty = there are none.
        draft_request: rows for which a model drafts behind what the step samples; None = for none.
    """

    step: int
    freed_rows: np.ndarray
    new_reqs: tuple[NewRequestData, ...]
    new_blocks: tuple[NewBlocks, ...]
    rows: np.ndarray
    num_scheduled_tokens: np.ndarray
    num_computed_tokens: np.ndarray
    is_prefill: np.ndarray
    is_sampling: np.ndarray
    total_num_scheduled_tokens: int
    block_copies: BlockCopies = NO_BLOCK_COPIES
    swap_outs: BlockCopies = NO_BLOCK_COPIES
    swap_ins: BlockCopies = NO_BLOCK_COPIES
    row_updates: RowUpdates = NO_ROW_UPDATES
    drafts: DraftTokens | None = None
    kv_transfers: KVTransferMeta | None = None
    states: tuple[StateBlocks, ...] = ()
    draft_request: DraftRequest | None = None

    def is_chunk(self) -> np.ndarray:
        """[num_reqs] bool; rows that compute several tokens they were given: a single one costs what decoding does."""
        is_chunk: np.ndarray = self.is_prefill & (self.num_scheduled_tokens > 1)
        return is_chunk

    def num_logits(self) -> np.ndarray:
        """[num_sampling] int; rows of logits of each row that samples: one, and one for each draft."""
        if self.drafts is None:
            return np.ones(int(np.count_nonzero(self.is_sampling)), dtype=np.int32)
        num_logits: np.ndarray = 1 + self.drafts.counts[self.is_sampling]
        return num_logits
