"""min-p, top-k and top-p as thresholds: each finds the smallest score that stays. Called by the sampler.

All three keep tokens that tie with the last one kept, so what is kept depends on the distribution alone:
min-p keeps a token of probability >= min_p * (largest); top-k one that fewer than k others beat; top-p one whose
strictly likelier tokens hold less than p of the mass. At least the likeliest stays. A line's result is the same
bits whatever the other lines are: only exact operations mix with widths that depend on the batch.
"""

from __future__ import annotations

import numpy as np
import torch

_FIRST_WIDTH = 128
_WIDTH_FACTOR = 8
# Below this ratio of line to wanted values a whole sort is faster than a selection.
_SORT_RATIO = 32


def min_p_threshold(logits: torch.Tensor, log_min_p: torch.Tensor) -> torch.Tensor:
    """[n] smallest logits kept, from [n, vocab_size] logits and [n] natural logarithms of min_p (-inf = off)."""
    return logits.amax(dim=-1) + log_min_p


def top_k_threshold(logits: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
    """[n] smallest logits kept, from [n, vocab_size] logits and [n] integer counts in [1, vocab_size]."""
    largest = _largest(logits, int(top_k.max()))
    return largest.gather(1, top_k[:, None].long() - 1)[:, 0]


def top_p_threshold(probs: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """[n] smallest probabilities kept, from [n, vocab_size] probabilities and [n] float64 masses in (0, 1].

    Looks at the likeliest tokens only, and at more of them for the lines where these hold too little. The mass is
    summed from the likeliest down in float64, so the width looked at does not change the sums.
    """
    thresholds = probs.new_empty(len(probs))
    lines = torch.arange(len(probs), device=probs.device)
    width = _FIRST_WIDTH
    while len(lines):
        largest = _largest(probs if len(lines) == len(probs) else probs.index_select(0, lines), width)
        mass = largest.cumsum(dim=-1, dtype=torch.float64)
        num_kept = 1 + (mass[:, :-1] < top_p[lines, None]).sum(dim=-1)
        thresholds[lines] = largest.gather(1, num_kept[:, None] - 1)[:, 0]
        looked_at = largest.shape[1]
        lines = lines[num_kept == looked_at] if looked_at < probs.shape[1] else lines[:0]
        width *= _WIDTH_FACTOR
    return thresholds


def drop_below_inplace(logits: torch.Tensor, scores: torch.Tensor, thresholds: torch.Tensor) -> None:
    """Make tokens impossible whose score ([n, vocab_size]; may be the logits) is below their line's threshold ([n])."""
    logits.masked_fill_(scores < thresholds[:, None], float("-inf"))


def _largest(values: torch.Tensor, count: int) -> torch.Tensor:
    """At least the `count` largest of each line, falling."""
    if count * _SORT_RATIO < values.shape[1]:
        return values.topk(count, dim=-1).values
    if values.device.type == "cpu":
        rising = np.sort(values.numpy(), axis=-1)  # vectorised, unlike torch's
        return torch.from_numpy(rising[:, ::-1].copy())
    return values.sort(dim=-1, descending=True).values
