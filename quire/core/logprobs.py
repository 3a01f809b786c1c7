"""Log-probabilities as arrays, as they travel from the sampler to the front-end."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class LogprobsArrays:
    """Log-probabilities of some of a step's entries.

    Attributes:
        index: [n] int32; which entry of the step each line belongs to, ascending.
        token_ids: [n, width] int32; column 0 is the sampled (or prompt) token, then the top tokens by
            falling log-probability, or those that were named; -1 pads lines that asked for fewer.
        logprobs: [n, width] float32, natural logarithm; NaN where `token_ids` is -1.
        ranks: [n, width] int32; 1-based rank of each token in the whole vocabulary (ties count against it); 0 =
            unknown, or padding.
    """

    index: np.ndarray
    token_ids: np.ndarray
    logprobs: np.ndarray
    ranks: np.ndarray

    def select(self, is_kept: np.ndarray) -> LogprobsArrays:
        """The lines of some of the step's entries, [num_entries] bool, which are numbered anew."""
        lines = is_kept[self.index]
        new_index = (np.cumsum(is_kept) - 1).astype(np.int32)
        return LogprobsArrays(
            new_index[self.index[lines]], self.token_ids[lines], self.logprobs[lines], self.ranks[lines]
        )
