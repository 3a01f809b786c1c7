"""Words that are never completed. Called by the sampler through `SamplingStates`; owns the outputs of rows that ask.

A word is a sequence of token ids. Its last id is impossible whenever the output so far ends with the ids before it,
so a word of one id is always impossible. The prompt does not count.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from quire.sample.logits_processor import RowRequest
from quire.sample.ragged import ragged_index, valid_ids
from quire.sample.sparse_processor import SparseProcessor
from quire.sample.token_masks import IMPOSSIBLE


@dataclass(slots=True)
class _Row:
    words: list[tuple[list[int], int]]  # (ids before the last, the last)
    output: list[int]

    def masked_ids(self) -> list[int]:
        return [last for prefix, last in self.words if not prefix or self.output[-len(prefix) :] == prefix]


class BadWords(SparseProcessor):
    """The last token of each of the request's `bad_words_token_ids` is impossible after the others."""

    def __init__(self, vocab_size: int, max_num_seqs: int, device: torch.device) -> None:
        super().__init__(vocab_size, max_num_seqs, device)
        self._rows: dict[int, _Row] = {}

    def is_argmax_invariant(self) -> bool:
        """It changes which token is likeliest."""
        return False

    def add_row(self, row: int, request: RowRequest) -> bool:
        """Acts on requests with bad words."""
        words = [(list(word[:-1]), word[-1]) for word in request.params.bad_words_token_ids or () if word]
        if not words:
            return False
        self._rows[row] = _Row(words, request.output_token_ids.tolist())
        return True

    def remove_row(self, row: int) -> None:
        """Forget the request."""
        del self._rows[row]

    def append(self, rows: np.ndarray, token_ids: np.ndarray) -> None:
        """Remember the output."""
        for row, token_id in zip(rows.tolist(), token_ids.tolist(), strict=True):
            self._rows[row].output.append(token_id)

    def apply_to_lines(self, logits: torch.Tensor, lines: np.ndarray, rows: np.ndarray) -> None:
        """Mask the ids that would complete a word."""
        masked = [valid_ids(self._rows[row].masked_ids(), self.vocab_size) for row in rows.tolist()]
        at, ids = ragged_index(masked, lines, self.device)
        logits[at, ids] = IMPOSSIBLE
