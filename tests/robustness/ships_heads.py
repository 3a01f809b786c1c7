"""Loaded by an engine core as a logits processor, to make checkpoints with a head of their own loadable there."""

from __future__ import annotations

import numpy as np
import torch

from quire.config.families.qwen import Qwen2
from quire.sample.logits_processor import LogitsProcessor, RowRequest

PROCESSOR = "tests.robustness.ships_heads:Nothing"
PATTERNS = (r"^mtp\.",)
Qwen2.ignored_tensors = PATTERNS


class Nothing(LogitsProcessor):
    """Changes no logits."""

    def is_argmax_invariant(self) -> bool:
        """As `LogitsProcessor`."""
        return True

    def add_row(self, row: int, request: RowRequest) -> bool:
        """As `LogitsProcessor`."""
        return False

    def remove_row(self, row: int) -> None:
        """As `LogitsProcessor`."""

    def append(self, rows: np.ndarray, token_ids: np.ndarray) -> None:
        """As `LogitsProcessor`."""

    def apply(self, logits: torch.Tensor, rows: np.ndarray) -> torch.Tensor:
        """As `LogitsProcessor`."""
        return logits
