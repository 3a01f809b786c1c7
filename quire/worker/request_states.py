"""RequestStates: the tokens of the requests on rows, on the host.

Owned by the model runner. Written when a request is placed on a row and when its tokens are sampled; read when the
inputs of a step are gathered. The buffer is large but memory is only taken where rows are written.
"""

from __future__ import annotations

import numpy as np

from quire.core.scheduler_output import DraftTokens, NewRequestData, RowUpdates


class RequestStates:
    """Fixed rows of token ids.

    Attributes:
        token_ids: [max_num_seqs, max_model_len + 1] int32; a free row holds what its last request left.
        num_prompt_tokens: [max_num_seqs] int32.
        num_prompt_logprobs: [max_num_seqs] int32; top tokens wanted per prompt position; -1 = none wanted.
        request_ids: user's names, for errors; "" on rows never used.
    """

    def __init__(self, max_num_seqs: int, max_model_len: int, vocab_size: int) -> None:
        self.token_ids = np.zeros((max_num_seqs, max_model_len + 1), dtype=np.int32)
        self.num_prompt_tokens = np.zeros(max_num_seqs, dtype=np.int32)
        self.num_prompt_logprobs = np.full(max_num_seqs, -1, dtype=np.int32)
        self.request_ids = [""] * max_num_seqs
        self._vocab_size = vocab_size

    def add_row(self, request: NewRequestData) -> None:
        """Place a request on its row.

        One that already has output gives no prompt log-probabilities: they were returned before its preemption.
        """
        row, num_tokens = request.row, len(request.token_ids)
        self.token_ids[row, :num_tokens] = request.token_ids
        self.num_prompt_tokens[row] = request.num_prompt_tokens
        self.request_ids[row] = request.request_id
        wanted = request.sampling_params.prompt_logprobs
        if wanted is None or num_tokens > request.num_prompt_tokens:
            wanted = -1
        elif wanted == -1:
            wanted = self._vocab_size
        self.num_prompt_logprobs[row] = min(wanted, self._vocab_size)

    def apply(self, updates: RowUpdates) -> None:
        """Rows take over the tokens of others; chosen tokens stand in place of sampled ones."""
        for fork in updates.forks:
            self.token_ids[fork.row, : fork.num_tokens] = self.token_ids[fork.source_row, : fork.num_tokens]
        for chosen in updates.chosen:
            self.append(chosen.rows, chosen.positions, chosen.token_ids)

    def append(self, rows: np.ndarray, positions: np.ndarray, token_ids: np.ndarray) -> None:
        """Write tokens: [n] rows, each token's index in its sequence, ids."""
        self.token_ids[rows, positions] = token_ids

    def write_drafts(self, rows: np.ndarray, seq_lens: np.ndarray, drafts: DraftTokens) -> None:
        """Put draft tokens at the end of the `seq_lens` ([num_reqs]) tokens that a step computes."""
        if len(rows) == 1:
            end = int(seq_lens[0])
            self.token_ids[int(rows[0]), end - len(drafts.token_ids) : end] = drafts.token_ids
            return
        first_of_row = np.cumsum(drafts.counts) - drafts.counts
        shifts = seq_lens - drafts.counts - first_of_row
        positions = np.arange(len(drafts.token_ids)) + np.repeat(shifts, drafts.counts)
        self.append(np.repeat(rows, drafts.counts), positions, drafts.token_ids)
