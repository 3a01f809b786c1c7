"""A logits processor that a request reaches by vllm_xargs: {"only": id}."""

from __future__ import annotations

import numpy as np
import torch

from quire.core.sampling_params import SamplingParams
from quire.errors import ValidationError
from quire.sample.logits_processor import LogitsProcessor, RowRequest


class Only(LogitsProcessor):
    """Allows one token."""

    quire_contract = 1

    def __init__(self, vocab_size: int, max_num_seqs: int, device: torch.device) -> None:
        super().__init__(vocab_size, max_num_seqs, device)
        self._ids = np.zeros(max_num_seqs, dtype=np.int64)

    @classmethod
    def validate_params(cls, params: SamplingParams) -> None:
        if not isinstance((params.extra_args or {}).get("only", 0), int):
            raise ValidationError("only is not a token id", field="only")

    def is_argmax_invariant(self) -> bool:
        return False

    def add_row(self, row: int, request: RowRequest) -> bool:
        self._ids[row] = (request.params.extra_args or {}).get("only", -1)
        return bool(self._ids[row] >= 0)

    def remove_row(self, row: int) -> None:
        self._ids[row] = -1

    def apply(self, logits: torch.Tensor, rows: np.ndarray) -> torch.Tensor:
        changed = torch.full_like(logits, float("-inf"))
        lines = torch.arange(len(rows))
        changed[lines, torch.from_numpy(self._ids[rows])] = 0.0
        return changed
