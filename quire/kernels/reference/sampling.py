"""Reference: choosing tokens from lines of logits, one line at a time, in float64 where sums matter."""

from __future__ import annotations

import numpy as np
import torch

IMPOSSIBLE = float("-inf")


def argmax(logits: torch.Tensor) -> np.ndarray:
    """[n] int32 likeliest ids, the lowest of equals; -1 where a line holds NaN or +inf, or nothing finite."""
    return np.array([_likeliest(line) for line in logits.numpy()], dtype=np.int32)


def filtered(logits: torch.Tensor, temperature: float, top_k: int, top_p: float, log_min_p: float) -> torch.Tensor:
    """One line of scores after temperature, min-p, top-k and top-p, in that order; dropped tokens are -inf.

    Args:
        logits: [vocab_size] float32, usable.
        top_k: 0 = off.
        log_min_p: -inf = off.
    """
    scores: torch.Tensor = logits / torch.tensor(temperature)
    scores = scores.masked_fill(scores < scores.max() + torch.tensor(log_min_p), IMPOSSIBLE)
    if 0 < top_k < len(scores):
        scores = scores.masked_fill(scores < scores.sort(descending=True).values[top_k - 1], IMPOSSIBLE)
    if top_p < 1.0:
        probs = torch.softmax(scores.double(), 0)
        order = scores.argsort(descending=True)
        is_new = torch.diff(scores[order], prepend=scores.new_tensor([float("inf")])) != 0
        mass_before = probs[order].cumsum(0) - probs[order]
        likelier = torch.where(is_new, mass_before, 0.0).cummax(0).values  # the same for equals
        scores = scores.clone()
        scores[order[likelier >= top_p]] = IMPOSSIBLE
    return scores


def draw(scores: torch.Tensor, uniform: float) -> int:
    """The id at `uniform` of the distribution function of one line of scores, over rising ids."""
    cumulative = torch.softmax(scores.double(), 0).cumsum(0)
    return int(torch.searchsorted(cumulative, uniform * float(cumulative[-1]), right=True))


def apply_penalties(
    line: torch.Tensor, token_ids: np.ndarray, counts: np.ndarray, repetition: float, frequency: float, presence: float
) -> torch.Tensor:
    """One [vocab_size] float32 line after the penalties on its distinct `token_ids`, with counts in the output."""
    changed = line.clone()
    strengths = torch.tensor([repetition, frequency, presence])
    for token_id, count in zip(token_ids.tolist(), torch.from_numpy(counts), strict=True):
        value = changed[token_id]
        value = value / strengths[0] if value > 0 else value * strengths[0]
        changed[token_id] = value - strengths[1] * count - (strengths[2] if count > 0 else 0.0)
    return changed


def apply_bitmask(line: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    """One [vocab_size] line with -inf where the bit of [ceil(vocab_size / 32)] int32 `words` is 0."""
    ids = torch.arange(len(line))
    is_allowed = (words.long()[ids // 32] >> (ids % 32)) & 1
    return line.masked_fill(is_allowed == 0, IMPOSSIBLE)


def logprobs(scores: torch.Tensor, token_id: int, num_top: int) -> tuple[list[int], int]:
    """(ids of the line: the given one, then the likeliest by falling score and rising id; rank of the given one)."""
    values = scores.tolist()
    top = sorted(range(len(values)), key=lambda i: (-values[i], i))[:num_top]
    return [token_id, *top], sum(value >= values[token_id] for value in values)


def _likeliest(line: np.ndarray) -> int:
    token_id = int(line.argmax())
    return token_id if np.isfinite(line[token_id]) else -1
