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
