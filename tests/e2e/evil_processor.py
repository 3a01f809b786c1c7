"""A logits processor that raises, or ends its process, when a request that asks for it is about to get token n."""

from __future__ import annotations

import os

import numpy as np
import torch

from quire.sample.logits_processor import LogitsProcessor, RowRequest


class Evil(LogitsProcessor):
    """Acts on `extra_args` {"raise_at": n} and {"exit_at": n}."""

    def __init__(self, vocab_size: int, max_num_seqs: int, device: torch.device) -> None:
        super().__init__(vocab_size, max_num_seqs, device)
        self._rows: dict[int, tuple[dict[str, int], int]] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def add_row(self, row: int, request: RowRequest) -> bool:
        wishes = request.params.extra_args or {}
        self._rows[row] = wishes, len(request.output_token_ids)
        return bool(wishes)

    def remove_row(self, row: int) -> None:
        del self._rows[row]

    def append(self, rows: np.ndarray, token_ids: np.ndarray) -> None:
        for row in rows.tolist():
            wishes, count = self._rows[row]
            self._rows[row] = wishes, count + 1

    def apply(self, logits: torch.Tensor, rows: np.ndarray) -> torch.Tensor:
        for row in rows.tolist():
            wishes, count = self._rows[row]
            if wishes.get("exit_at") == count:
                os._exit(77)
            if wishes.get("raise_at") == count:
                raise RuntimeError(f"token {count} is too much")
        return logits
