"""RequestTable: what the scheduler knows of admitted requests, as columns of arrays.

Written by the scheduler alone. A request owns one row from admission until it ends or is preempted; the same
row number names it in the worker. Decisions about all requests of a step are vector operations over rows.
"""

from __future__ import annotations

from enum import IntFlag

import numpy as np

from quire.core.request import Request


class RowFlag(IntFlag):
    """Unusual needs of a row; only flagged rows take the slow path that serves them."""

    NONE = 0
    HAS_STOP_IDS = 1
    BEAM = 2
    GRAMMAR = 4


NEEDS_TOKEN = int(RowFlag.BEAM | RowFlag.GRAMMAR)
"""Rows whose next step is planned when their newest token is known; a plain integer, as these are faster."""


class RequestTable:
    """Fixed rows; columns are public and indexed by row.

    Attributes:
        token_ids: [max_num_seqs, max_model_len] int32; prompt and output. Memory not written is not touched.
        num_tokens: [max_num_seqs] int32; prompt and output tokens so far.
        num_prompt_tokens: [max_num_seqs] int32.
        num_computed_tokens: [max_num_seqs] int32; tokens whose keys and values are in the cache.
        max_total_tokens: [max_num_seqs] int32; at this many tokens the request ends.
        min_total_tokens: [max_num_seqs] int32; below this many tokens no stop id ends it.
        eos_token_id: [max_num_seqs] int32; -1 = none, or ignored.
        num_computing: [max_num_seqs] int32; tokens that steps in flight compute; 0 where only one may be in flight.
        num_pending: [max_num_seqs] int32; tokens that they sample, which are not known yet.
        num_drafting: [max_num_seqs] int32; of the tokens that they sample, those that come only if drafts are right.
        is_ahead: whether any row has such tokens.
        placement: [max_num_seqs] int64; which placement of a request on a row this is; -1 = free row.
        flags: [max_num_seqs] uint8; `RowFlag`.
        handle: [max_num_seqs] int64; -1 = free row.
        rank: [max_num_seqs] int64; place in the order in which requests are served.
        tenant_slot: [max_num_seqs] int32; whose it is, where tenants share (`scheduler.fair_order`).
        requests: the request of each row, None = free row.
        max_model_len: most tokens of a row.
    """

    def __init__(self, max_num_seqs: int, max_model_len: int) -> None:
        self.max_model_len = max_model_len
        self.token_ids = np.zeros((max_num_seqs, max_model_len), dtype=np.int32)
        self.num_tokens = np.zeros(max_num_seqs, dtype=np.int32)
        self.num_prompt_tokens = np.zeros(max_num_seqs, dtype=np.int32)
        self.num_computed_tokens = np.zeros(max_num_seqs, dtype=np.int32)
        self.num_computing = np.zeros(max_num_seqs, dtype=np.int32)
        self.num_pending = np.zeros(max_num_seqs, dtype=np.int32)
        self.num_drafting = np.zeros(max_num_seqs, dtype=np.int32)
        self.is_ahead = False
        self.placement = np.full(max_num_seqs, -1, dtype=np.int64)
        self._num_placements = 0
        self.max_total_tokens = np.zeros(max_num_seqs, dtype=np.int32)
        self.min_total_tokens = np.zeros(max_num_seqs, dtype=np.int32)
        self.eos_token_id = np.full(max_num_seqs, -1, dtype=np.int32)
        self.flags = np.zeros(max_num_seqs, dtype=np.uint8)
        self.handle = np.full(max_num_seqs, -1, dtype=np.int64)
        self.rank = np.zeros(max_num_seqs, dtype=np.int64)
        self.tenant_slot = np.zeros(max_num_seqs, dtype=np.int32)
        self.requests: list[Request | None] = [None] * max_num_seqs
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))

    @property
    def num_free_rows(self) -> int:
        """Rows that no request owns."""
        return len(self._free_rows)

    def allocate(self, request: Request, num_computed_tokens: int) -> int:
        """Put a request on a free row, `num_computed_tokens` of it being cached; there must be a free row."""
        row = self._free_rows.pop()
        message, params = request.message, request.message.sampling_params
        num_tokens, num_prompt_tokens = len(request.token_ids), request.num_prompt_tokens
        self.token_ids[row, :num_tokens] = request.token_ids
        self.num_tokens[row] = num_tokens
        self.num_prompt_tokens[row] = num_prompt_tokens
        self.num_computed_tokens[row] = num_computed_tokens
        self.num_computing[row] = self.num_pending[row] = self.num_drafting[row] = 0
        self.placement[row] = self._num_placements
        self._num_placements += 1
        self.max_total_tokens[row] = max_total_tokens(num_prompt_tokens, params.max_tokens, self.max_model_len)
        self.min_total_tokens[row] = num_prompt_tokens + params.min_tokens
        self.eos_token_id[row] = -1 if params.ignore_eos else message.eos_token_id
        flags = RowFlag.HAS_STOP_IDS if request.stop_token_ids else RowFlag.NONE
        if params.beam_search is not None:
            flags |= RowFlag.BEAM
        if params.structured_outputs is not None or params.thinking_token_budget is not None:
            flags |= RowFlag.GRAMMAR
        self.flags[row] = flags
        self.handle[row] = request.handle
        self.rank[row] = request.rank
        self.tenant_slot[row] = request.tenant_slot
        self.requests[row] = request
        request.row = row
        return row

    def starts(self, rows: np.ndarray) -> np.ndarray:
        """[num_rows] tokens that are computed once the steps in flight are: where the next step goes on."""
        starts: np.ndarray = self.num_computed_tokens[rows]
        if self.is_ahead:
            starts += self.num_computing[rows]
        return starts

    def lengths(self, rows: np.ndarray) -> np.ndarray:
        """[num_rows] tokens that rows have once the steps in flight are taken in, if no stop ends them."""
        lengths: np.ndarray = self.num_tokens[rows]
        if self.is_ahead:
            lengths += self.num_pending[rows]
        return lengths

    def num_left(self, rows: np.ndarray) -> np.ndarray:
        """[num_rows] tokens that no step has computed; at least 1 when a step is planned, as the newest one is not."""
        num_left: np.ndarray = self.lengths(rows) - self.starts(rows)
        return num_left

    def is_prefill(self, rows: np.ndarray) -> np.ndarray:
        """[num_rows] bool; several tokens are left to compute. Else a row decodes: its newest token alone is left."""
        return self.num_left(rows) > 1

    def append_tokens(self, rows: np.ndarray, token_ids: np.ndarray, turns: np.ndarray | None = None) -> None:
        """Add tokens to rows.

        Args:
            rows, token_ids: [num_tokens].
            turns: [num_tokens] how many tokens of its row come before each, rising; None = the rows are distinct.
        """
        num_tokens = self.num_tokens[rows] if turns is None else self.num_tokens[rows] + turns
        self.token_ids[rows, num_tokens] = token_ids
        self.num_tokens[rows] = num_tokens + 1

    def tokens_of(self, row: int) -> np.ndarray:
        """[num_tokens] int32, a copy."""
        return np.array(self.token_ids[row, : self.num_tokens[row]])

    def request_on(self, row: int) -> Request:
        """The request that owns this row."""
        request = self.requests[row]
        assert request is not None, "only rows in use are asked for their request"
        return request

    def free(self, row: int) -> None:
        """Take the row from its request."""
        self.request_on(row).row = -1
        self.requests[row] = None
        self.handle[row] = self.placement[row] = -1
        self._free_rows.append(row)


def max_total_tokens(num_prompt_tokens: int, max_tokens: int | None, max_model_len: int) -> int:
    """Prompt and output tokens at which a request ends; `max_tokens` None = as many as fit."""
    return max_model_len if max_tokens is None else min(num_prompt_tokens + max_tokens, max_model_len)
