"""The scheduler's decision for one step: the only message that crosses from control plane to data plane.

Made by `Scheduler.schedule`, read by `ModelRunner`. Rows are the fixed row numbers of admitted requests;
both sides use the same ones. Arrays are not to be written after the message is made.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

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
        block_ids: per KV cache group: [num_blocks] int32; pages 0.. of the request, cached ones included.
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
    """Pages appended to running rows in this step, for one KV cache group: table[rows, columns] = block_ids.

    All three are [num_new_blocks] int32.
    """

    rows: np.ndarray
    columns: np.ndarray
    block_ids: np.ndarray


@dataclass(frozen=True, slots=True)
class PageCopies:
    """Pages to be copied onto others, in every layer. Both are [num_copies] int32; no target is a source."""

    source_ids: np.ndarray
    target_ids: np.ndarray

    def __len__(self) -> int:
        return len(self.source_ids)


_NO_IDS = np.empty(0, dtype=np.int32)
NO_PAGE_COPIES = PageCopies(_NO_IDS, _NO_IDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerOutput:
    """What one step runs.

    The receiver applies `freed_rows`, then `swap_outs`, then `swap_ins`, then `new_reqs`, then `new_blocks`, then
    `page_copies`, then computes the tokens. So a page may be swapped out, given to another request and written in one
    step.

    Attributes:
        step: number of the step, from 0.
        freed_rows: [.] int32; rows whose request finished, was aborted or preempted since the last message.
        new_reqs: requests placed on rows.
        new_blocks: per KV cache group, pages appended to rows that were already placed.
        rows: [num_reqs] int32; rows that compute in this step, in the order of the batch, distinct.
        num_scheduled_tokens: [num_reqs] int32, each >= 1.
        num_computed_tokens: [num_reqs] int32; tokens whose KV is in the cache before this step.
        is_sampling: [num_reqs] bool; the last scheduled token is the row's newest, so a token is sampled.
        total_num_scheduled_tokens: sum of `num_scheduled_tokens`.
        page_copies: partly filled pages that a request takes over from another one and is about to write to.
        swap_outs: pages of the cache, copied to pages of the swap space.
        swap_ins: pages of the swap space, copied to pages of the cache.
    """

    step: int
    freed_rows: np.ndarray
    new_reqs: tuple[NewRequestData, ...]
    new_blocks: tuple[NewBlocks, ...]
    rows: np.ndarray
    num_scheduled_tokens: np.ndarray
    num_computed_tokens: np.ndarray
    is_sampling: np.ndarray
    total_num_scheduled_tokens: int
    page_copies: PageCopies = NO_PAGE_COPIES
    swap_outs: PageCopies = NO_PAGE_COPIES
    swap_ins: PageCopies = NO_PAGE_COPIES
