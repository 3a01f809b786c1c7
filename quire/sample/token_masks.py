"""Rules on fixed token ids: allowed ids, logit bias, no end of sequence before `min_tokens`.

Called by the sampler through `SamplingStates`. Each rule owns the id lists of the rows that asked for it.
"""

from __future__ import annotations

import numpy as np
import torch

from quire.sample.logits_processor import LogitsProcessor, RowRequest
from quire.sample.ragged import ragged_index, to_device, valid_ids
from quire.sample.sparse_processor import SparseProcessor

IMPOSSIBLE = float("-inf")


class AllowedTokenIds(LogitsProcessor):
    """Every token outside the request's `allowed_token_ids` becomes impossible."""

    def __init__(self, vocab_size: int, max_num_seqs: int, device: torch.device) -> None:
        super().__init__(vocab_size, max_num_seqs, device)
        self._ids: dict[int, np.ndarray] = {}

    def is_argmax_invariant(self) -> bool:
        """It changes which token is likeliest."""
        return False

    def add_row(self, row: int, request: RowRequest) -> bool:
        """Acts on requests that name allowed ids."""
        if not request.params.allowed_token_ids:
            return False
        self._ids[row] = valid_ids(request.params.allowed_token_ids, self.vocab_size)
        return True

    def remove_row(self, row: int) -> None:
        """Forget the request."""
        del self._ids[row]

    def apply(self, logits: torch.Tensor, rows: np.ndarray) -> torch.Tensor:
        """Copy the allowed logits into a line of impossible ones."""
        lines, ids = ragged_index([self._ids[row] for row in rows.tolist()], np.arange(len(rows)), self.device)
        masked = torch.full_like(logits, IMPOSSIBLE)
        masked[lines, ids] = logits[lines, ids]
        return masked


class LogitBias(SparseProcessor):
    """`logit_bias[id]` is added to the logit of each id."""

    def __init__(self, vocab_size: int, max_num_seqs: int, device: torch.device) -> None:
        super().__init__(vocab_size, max_num_seqs, device)
        self._biases: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def is_argmax_invariant(self) -> bool:
        """It changes which token is likeliest."""
        return False

    def add_row(self, row: int, request: RowRequest) -> bool:
        """Acts on requests with biases."""
        biases = request.params.logit_bias
        if not biases:
            return False
        ids = valid_ids(list(biases), self.vocab_size)
        self._biases[row] = ids, np.array([biases[token_id] for token_id in ids.tolist()], dtype=np.float32)
        return True

    def remove_row(self, row: int) -> None:
        """Forget the request."""
        del self._biases[row]

    def apply_to_lines(self, logits: torch.Tensor, lines: np.ndarray, rows: np.ndarray) -> None:
        """Add the biases."""
        biases = [self._biases[row] for row in rows.tolist()]
        at, ids = ragged_index([ids for ids, _ in biases], lines, self.device)
        logits[at, ids] += to_device(np.concatenate([values for _, values in biases]), self.device)


class MinTokens(SparseProcessor):
    """EOS and stop ids are impossible until the request has `min_tokens` output tokens."""

    def __init__(self, vocab_size: int, max_num_seqs: int, device: torch.device) -> None:
        super().__init__(vocab_size, max_num_seqs, device)
        self._stop_ids: dict[int, np.ndarray] = {}
        self._num_missing = np.zeros(max_num_seqs, dtype=np.int64)

    def is_argmax_invariant(self) -> bool:
        """It changes which token is likeliest."""
        return False

    def add_row(self, row: int, request: RowRequest) -> bool:
        """Acts while tokens are missing and there is an id to mask."""
        num_missing = request.params.min_tokens - len(request.output_token_ids)
        stop_ids = valid_ids([request.eos_token_id, *(request.params.stop_token_ids or ())], self.vocab_size)
        if num_missing <= 0 or not len(stop_ids):
            return False
        self._stop_ids[row] = stop_ids
        self._num_missing[row] = num_missing
        return True

    def remove_row(self, row: int) -> None:
        """Forget the request."""
        del self._stop_ids[row]

    def append(self, rows: np.ndarray, token_ids: np.ndarray) -> None:
        """One token fewer is missing."""
        self._num_missing[rows] -= 1

    def apply_to_lines(self, logits: torch.Tensor, lines: np.ndarray, rows: np.ndarray) -> None:
        """Mask the rows that miss tokens."""
        none = np.empty(0, dtype=np.int64)
        missing = (self._num_missing[rows] > 0).tolist()
        masked = [self._stop_ids[row] if short else none for row, short in zip(rows.tolist(), missing, strict=True)]
        at, ids = ragged_index(masked, lines, self.device)
        logits[at, ids] = IMPOSSIBLE
