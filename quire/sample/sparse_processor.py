"""SparseProcessor: a rule of the sampler's own that changes few logits of a line. Called by `SamplingStates`."""

from __future__ import annotations

from abc import abstractmethod

import numpy as np
import torch

from quire.sample.logits_processor import LogitsProcessor


class SparseProcessor(LogitsProcessor):
    """Gets the logits of the whole step and the lines to change: no line is copied for it."""

    @abstractmethod
    def apply_to_lines(self, logits: torch.Tensor, lines: np.ndarray, rows: np.ndarray) -> None:
        """Change some lines.

        Args:
            logits: [n, vocab_size] float32; mutated.
            lines: [num_lines] integers, distinct; where in `logits` the rows are.
            rows: [num_lines] int32; the row of each line, distinct.
        """

    def apply(self, logits: torch.Tensor, rows: np.ndarray) -> torch.Tensor:
        """Change every line."""
        self.apply_to_lines(logits, np.arange(len(rows)), rows)
        return logits
