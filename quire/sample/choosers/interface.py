"""Chooser: the last step of sampling, called by the sampler."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch


class Chooser(Protocol):
    """The argmax of every line; for random rows temperature, custom processors, min-p, top-k, top-p and a draw.

    Attributes:
        changes_logits: whether `choose` changes lines that are not shown and have no custom processor.
    """

    changes_logits: bool

    def choose(
        self, logits: torch.Tensor, rows: np.ndarray, positions: np.ndarray, flags: np.ndarray, shown: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Choose a token for each line.

        Args:
            logits: [n, vocab_size] float32, columns adjacent; may be changed. The `shown` lines of random rows
                become the scores that were drawn from, with -inf for dropped tokens; those of greedy rows stay.
            rows: [n] int32, distinct.
            positions: [n] integers; index in its sequence of the token to be chosen.
            flags: [n] int64; `Need` bits of the rows.
            shown: [num_shown] line numbers, rising.

        Returns:
            ([n] int32 tokens inside the vocabulary, [n] bool: logits NaN or infinite, or no token possible).

        Raises:
            EngineGenerateError: a custom processor raised.
        """
        ...
