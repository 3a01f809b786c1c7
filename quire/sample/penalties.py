"""Repetition, frequency and presence penalties. Called by the sampler through `SamplingStates`.

Owns, for each row that asks, the distinct tokens of prompt and output with their output counts: memory grows with
the request's length, not with the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from quire.sample.logits_processor import RowRequest
from quire.sample.ragged import ragged_index, to_device
from quire.sample.sparse_processor import SparseProcessor

_MIN_CAPACITY = 64


class _SeenTokens:
    """Distinct token ids of one request, and how often each is in its output."""

    def __init__(self, prompt_token_ids: np.ndarray, output_token_ids: np.ndarray) -> None:
        seen = np.unique(np.concatenate((prompt_token_ids, output_token_ids)))
        self._slot_of = {token_id: slot for slot, token_id in enumerate(seen.tolist())}
        self._ids = self._grown(seen.astype(np.int64), 2 * len(seen))
        self._counts = np.zeros(len(self._ids), dtype=np.float32)
        for token_id in output_token_ids.tolist():
            self.add(token_id)

    @property
    def ids(self) -> np.ndarray:
        """[num_seen] int64, distinct."""
        return self._ids[: len(self._slot_of)]

    @property
    def counts(self) -> np.ndarray:
        """[num_seen] float32; occurrences in the output."""
        return self._counts[: len(self._slot_of)]

    def add(self, token_id: int) -> None:
        """Count one more output token."""
        slot = self._slot_of.setdefault(token_id, len(self._slot_of))
        if slot == len(self._ids):
            self._ids, self._counts = (self._grown(column, 2 * slot) for column in (self._ids, self._counts))
        self._ids[slot] = token_id
        self._counts[slot] += 1

    @staticmethod
    def _grown(column: np.ndarray, capacity: int) -> np.ndarray:
        grown = np.zeros(max(capacity, _MIN_CAPACITY), dtype=column.dtype)
        grown[: len(column)] = column
        return grown


class ApplyPenalties(Protocol):
    """A device's operation for `Penalties`."""

    def __call__(
        self,
        logits: torch.Tensor,
        lines: np.ndarray,
        token_ids: Sequence[np.ndarray],
        counts: np.ndarray,
        strengths: np.ndarray,
    ) -> None:
        """Change the logits of tokens that were seen before.

        Args:
            logits: [n, vocab_size] float32; mutated.
            lines: [num_lines] integers, distinct; where in `logits` the requests are.
            token_ids: for each line its tokens, [num_seen] int64, distinct.
            counts: [sum of num_seen] float32; how often each of these is in the output.
            strengths: [num_lines, 3] float32: repetition, frequency, presence.
        """
        ...


def apply_penalties_inplace(
    logits: torch.Tensor,
    lines: np.ndarray,
    token_ids: Sequence[np.ndarray],
    counts: np.ndarray,
    strengths: np.ndarray,
) -> None:
    """`ApplyPenalties` by torch operations, on any device."""
    at, ids = ragged_index(token_ids, lines, logits.device)
    of_entry = np.repeat(np.arange(len(token_ids)), [len(tokens) for tokens in token_ids])
    repetition, frequency, presence = to_device(strengths[of_entry], logits.device).unbind(1)
    device_counts = to_device(counts, logits.device)
    values = logits[at, ids]
    values = torch.where(values > 0, values / repetition, values * repetition)
    logits[at, ids] = values - frequency * device_counts - presence * (device_counts > 0)


class Penalties(SparseProcessor):
    """Makes tokens that were seen before less likely.

    A token of prompt or output: logit / repetition_penalty when positive, else logit * repetition_penalty.
    Then a token of the output: logit - frequency_penalty * count - presence_penalty.

    Args:
        apply_inplace: the device's operation; all give the same bits.
    """

    def __init__(
        self,
        vocab_size: int,
        max_num_seqs: int,
        device: torch.device,
        apply_inplace: ApplyPenalties = apply_penalties_inplace,
    ) -> None:
        super().__init__(vocab_size, max_num_seqs, device)
        self._apply_inplace = apply_inplace
        self._seen: dict[int, _SeenTokens] = {}
        # [max_num_seqs, 3] float32: repetition, frequency, presence.
        self._strengths = np.zeros((max_num_seqs, 3), dtype=np.float32)

    def is_argmax_invariant(self) -> bool:
        """It changes which token is likeliest."""
        return False

    def add_row(self, row: int, request: RowRequest) -> bool:
        """Acts on requests with a penalty that does something."""
        params = request.params
        strengths = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
        if strengths == (1.0, 0.0, 0.0):
            return False
        self._strengths[row] = strengths
        self._seen[row] = _SeenTokens(request.prompt_token_ids, request.output_token_ids)
        return True

    def remove_row(self, row: int) -> None:
        """Forget the request."""
        del self._seen[row]

    def append(self, rows: np.ndarray, token_ids: np.ndarray) -> None:
        """Count the tokens."""
        for row, token_id in zip(rows.tolist(), token_ids.tolist(), strict=True):
            self._seen[row].add(token_id)

    def apply_to_lines(self, logits: torch.Tensor, lines: np.ndarray, rows: np.ndarray) -> None:
        """Touch the logits of seen tokens only."""
        seen = [self._seen[row] for row in rows.tolist()]
        counts = np.concatenate([tokens.counts for tokens in seen])
        self._apply_inplace(logits, lines, [tokens.ids for tokens in seen], counts, self._strengths[rows])
