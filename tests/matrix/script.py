"""A logits processor that makes a real engine write a given text, for formats that the embedded model does not know."""

from __future__ import annotations

import numpy as np
import torch

from quire.sample.logits_processor import LogitsProcessor, RowRequest


class Script(LogitsProcessor):
    """Requests with extra_args={"script": [ids]} get these tokens, then their end of sequence."""

    def __init__(self, vocab_size: int, max_num_seqs: int, device: torch.device) -> None:
        super().__init__(vocab_size, max_num_seqs, device)
        self._left: dict[int, list[int]] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def add_row(self, row: int, request: RowRequest) -> bool:
        script = (request.params.extra_args or {}).get("script")
        if script is None:
            return False
        self._left[row] = [*script, request.eos_token_id][len(request.output_token_ids) :]
        return True

    def remove_row(self, row: int) -> None:
        del self._left[row]

    def append(self, rows: np.ndarray, token_ids: np.ndarray) -> None:
        for row in rows.tolist():
            self._left[row] = self._left[row][1:]

    def apply(self, logits: torch.Tensor, rows: np.ndarray) -> torch.Tensor:
        for line, row in enumerate(rows.tolist()):
            if self._left[row]:
                kept = logits[line, self._left[row][0]].item()
                logits[line] = float("-inf")
                logits[line, self._left[row][0]] = kept
        return logits
