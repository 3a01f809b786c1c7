"""The sampler's semantics, one row at a time, in plain Python and float64. No shared code."""

from __future__ import annotations

import math

import numpy as np

from quire.core.sampling_params import SamplingParams


def constrained_logits(
    logits: np.ndarray, params: SamplingParams, prompt: list[int], output: list[int], eos_token_id: int = -1
) -> np.ndarray:
    """Masks, bias and penalties on one line of logits."""
    x = logits.astype(np.float64).copy()
    if params.allowed_token_ids:
        for token_id in range(len(x)):
            if token_id not in params.allowed_token_ids:
                x[token_id] = -math.inf
    for word in params.bad_words_token_ids or []:
        *prefix, last = word
        if len(prefix) <= len(output) and output[len(output) - len(prefix) :] == prefix:
            x[last] = -math.inf
    if len(output) < params.min_tokens:
        for token_id in [eos_token_id, *(params.stop_token_ids or [])]:
            if token_id >= 0:
                x[token_id] = -math.inf
    for token_id, bias in (params.logit_bias or {}).items():
        x[token_id] += bias
    for token_id in set(prompt) | set(output):
        x[token_id] = (
            x[token_id] / params.repetition_penalty if x[token_id] > 0 else x[token_id] * params.repetition_penalty
        )
    for token_id in set(output):
        x[token_id] -= params.frequency_penalty * output.count(token_id) + params.presence_penalty
    return x


def distribution(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Exact probabilities of the draw, from constrained logits."""
    x = logits / params.temperature
    p = softmax(x)
    kept = p >= params.min_p * p.max()
    if params.top_k > 0:
        kept &= np.array([(x > value).sum() < params.top_k for value in x])
    p = softmax(np.where(kept, x, -math.inf))
    if params.top_p < 1.0:
        likelier = np.array([p[x > value].sum() for value in x])
        p = np.where(likelier < params.top_p, p, 0.0)
    return p / p.sum()


def softmax(x: np.ndarray) -> np.ndarray:
    """Float64 softmax of one line."""
    p = np.exp(x - x.max())
    return p / p.sum()


def draw(probs: np.ndarray, uniform: float) -> int:
    """Inverse of the distribution function over rising ids."""
    cumulative = 0.0
    for token_id, p in enumerate(probs):
        cumulative += p
        if cumulative > uniform:
            return token_id
    return int(np.flatnonzero(probs)[-1])


def logprob_line(scores: np.ndarray, token_id: int, num_top: int) -> tuple[list[int], list[int]]:
    """(ids, ranks) of one line: the token, then the top ones by falling score and rising id."""
    top = sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:num_top]
    rank = sum(1 for score in scores if score >= scores[token_id])
    return [token_id, *top], [rank, *range(1, num_top + 1)]
