"""Which drafts stand by ratios of probabilities: rejection sampling, block verification, typical acceptance.

Called by the sampler, and by `worker.block_verification`, where an engine is configured so; by default a draft stands
when it is the token that would be sampled (`worker.draft_verification`). p is what the ordinary sampler draws from:
masks, penalties, temperature and filters applied, with the drafts before it counted as output. q is what the draft was
drawn from; all of it is on the draft itself where the proposer did not draw. No state.

Rejection sampling and block verification give tokens of the distribution of plain decoding, though not its bytes.
Typical acceptance does not.

Sources: Leviathan, Kalman, Matias 2023, "Fast inference from transformers via speculative decoding", section 2.3;
Sun et al. 2024, "Block verification accelerates speculative decoding", algorithm 2; Cai et al. 2024, "Medusa",
section 2.3.1. Reference: kernels/reference/rejection_sampler.py
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from quire.sample.ops.torch_ops import draw_by_weight
from quire.sample.ragged import take_lines, to_device
from quire.sample.rng import STREAM_ACCEPT, STREAM_RESIDUAL, uniform


@dataclass(frozen=True, slots=True)
class DraftedLines:
    """The drafts in the places of the tokens that n lines of logits give.

    Attributes:
        token_ids: [n] int32; -1 = none.
        num_before: [n] integers; drafts before it in its row.
        drawn: [num_drawn] integers, rising; lines whose draft was drawn.
        probs: [num_drawn, vocab_size] float32; what these were drawn from.
    """

    token_ids: np.ndarray
    num_before: np.ndarray
    drawn: np.ndarray
    probs: torch.Tensor

    def take(self, lines: np.ndarray) -> DraftedLines:
        """Some lines, rising."""
        is_taken = np.isin(self.drawn, lines)
        kept = np.flatnonzero(is_taken)
        probs = self.probs if len(kept) == len(self.drawn) else take_lines(self.probs, kept)
        return DraftedLines(
            self.token_ids[lines], self.num_before[lines], np.searchsorted(lines, self.drawn[is_taken]), probs
        )


class AcceptanceRule(Protocol):
    """Decides line by line: `RejectionSampler` and `TypicalAcceptance`."""

    def choose(
        self,
        probs: torch.Tensor,
        sampled: np.ndarray,
        drafted: DraftedLines,
        seeds: np.ndarray,
        positions: np.ndarray,
    ) -> np.ndarray:
        """[n] int32: the draft where it stands, else the token in its place.

        Args:
            probs: [n, vocab_size] float32; p of random requests.
            sampled: [n] int32; drawn from p by the ordinary sampler.
            drafted: a draft for every line.
            seeds, positions: [n]; as the sampler's.
        """
        ...


class RejectionSampler:
    """Keeps a draft x with probability min(1, p(x) / q(x)), else draws from what p has more than q."""

    def choose(
        self,
        probs: torch.Tensor,
        sampled: np.ndarray,
        drafted: DraftedLines,
        seeds: np.ndarray,
        positions: np.ndarray,
    ) -> np.ndarray:
        """As `AcceptanceRule`, by numbers of the position alone: what is behind a rejected draft was not looked at."""
        chances = uniform(seeds, positions, STREAM_ACCEPT)
        stands = chances * _of_drafts(drafted) < _at(probs, drafted.token_ids)
        rejected = np.flatnonzero(~stands)
        chosen: np.ndarray = drafted.token_ids.copy()
        if len(rejected):
            scale = np.ones(len(rejected))
            weights = excess(take_lines(probs, rejected), scale, drafted.take(rejected))
            chosen[rejected] = draw_excess(weights, sampled[rejected], seeds[rejected], positions[rejected])
        return chosen


class TypicalAcceptance:
    """Keeps a draft x with p(x) > min(threshold, alpha * exp(-entropy of p)): not the distribution of plain decoding.

    Args:
        threshold, alpha: above 0; the smaller, the more stands. `posterior_threshold` and `posterior_alpha`.
    """

    def __init__(self, threshold: float, alpha: float) -> None:
        self._threshold = threshold
        self._alpha = alpha

    def choose(
        self,
        probs: torch.Tensor,
        sampled: np.ndarray,
        drafted: DraftedLines,
        seeds: np.ndarray,
        positions: np.ndarray,
    ) -> np.ndarray:
        """As `AcceptanceRule`; where the draft does not stand, the ordinary sampler's token."""
        entropy = torch.special.entr(probs).sum(dim=1, dtype=torch.float64).cpu().numpy()
        limits = np.minimum(self._threshold, self._alpha * np.exp(-entropy))
        stands = _at(probs, drafted.token_ids) > limits
        return np.where(stands, drafted.token_ids, sampled).astype(np.int32)


def block_acceptance(probs: torch.Tensor, scale: np.ndarray, drafted: DraftedLines) -> tuple[np.ndarray, np.ndarray]:
    """For lines behind i drafts with one more draft: the chance to stop there at least, and the next scale.

    Args:
        probs: [n, vocab_size] float32; p behind the i drafts.
        scale: [n] float64 in 0..1: the paper's p_i; 1 for i = 0.
        drafted: the next draft of each line.

    Returns:
        ([n] float64: h_i, the chance that the first i drafts stand; [n] float64: p_(i + 1), which is also the chance
        that i + 1 drafts stand where no more follow).
    """
    mass = excess(probs, scale, drafted).sum(dim=1).cpu().numpy()
    rest = mass + 1.0 - scale
    chance = np.divide(mass, rest, out=np.zeros_like(mass), where=rest > 0)
    ratio = _at(probs, drafted.token_ids) / _of_drafts(drafted)
    return chance, np.minimum(scale * ratio, 1.0)


def excess(probs: torch.Tensor, scale: np.ndarray, drafted: DraftedLines) -> torch.Tensor:
    """[n, vocab_size] float64: max(scale * p - q, 0), a draft on every line; where it was not drawn q is one-hot."""
    weights = probs.double() * to_device(scale, probs.device)[:, None]
    own = np.setdiff1d(np.arange(len(weights)), drafted.drawn, assume_unique=True)
    if len(own):  # scale * p(x) is at most 1
        weights[to_device(own, probs.device), to_device(drafted.token_ids[own].astype(np.int64), probs.device)] = 0.0
    if len(drafted.drawn):
        weights[to_device(drafted.drawn, probs.device)] -= drafted.probs
    return weights.clamp_(min=0.0)


def draw_excess(weights: torch.Tensor, sampled: np.ndarray, seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """[n] int32, drawn from `excess`; `sampled` where nothing is left: p and q are the same but for rounding."""
    drawn = draw_by_weight(weights, uniform(seeds, positions, STREAM_RESIDUAL))
    return np.where(weights.amax(dim=1).cpu().numpy() > 0, drawn, sampled).astype(np.int32)


def _of_drafts(drafted: DraftedLines) -> np.ndarray:
    """[n] float64: q of each draft."""
    found = np.ones(len(drafted.token_ids))
    if len(drafted.drawn):
        found[drafted.drawn] = _at(drafted.probs, drafted.token_ids[drafted.drawn])
    return found


def _at(probs: torch.Tensor, token_ids: np.ndarray) -> np.ndarray:
    """[n] float64: the entry of each line."""
    ids = to_device(token_ids.astype(np.int64), probs.device)
    return probs.gather(1, ids[:, None])[:, 0].double().cpu().numpy()
