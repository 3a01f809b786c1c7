"""A logits processor that raises for the requests that ask for it, so that they end with an error."""

from __future__ import annotations

import numpy as np
import torch

from quire.sample.logits_processor import LogitsProcessor, RowRequest

PROCESSOR = "tests.robustness.failing_rows:FailingRows"


class FailingRows(LogitsProcessor):
    """Requests with extra_args={"fail": 1} fail in their first step."""

    def is_argmax_invariant(self) -> bool:
        """It gives no scores at all."""
        return False

    def add_row(self, row: int, request: RowRequest) -> bool:
        """Those that ask for it."""
        return bool((request.params.extra_args or {}).get("fail"))

    def remove_row(self, row: int) -> None:
        """Nothing is kept."""

    def apply(self, logits: torch.Tensor, rows: np.ndarray) -> torch.Tensor:
        """Raises RuntimeError."""
        raise RuntimeError("this request fails on purpose")
