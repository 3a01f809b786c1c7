"""Which token of its distribution a model drafts: the likeliest one, or one drawn from it.

Made by the worker, called by the models that draft, once for each place in their chains. `DrawnTokens` is for
acceptance by ratios of probabilities: what a draft was drawn from is kept until it is judged (`sample.drawn_drafts`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
import torch

from quire.sample.drawn_drafts import DrawnDrafts
from quire.sample.ops.interface import SamplingOps
from quire.sample.ragged import take_lines

ComputeLogits = Callable[[torch.Tensor], torch.Tensor]
TargetIds = Callable[[np.ndarray], np.ndarray]
"""The target's ids of tokens of a draft vocabulary."""


class Chosen(NamedTuple):
    """Of each line of logits a draft, [n] int32 ids of the target, -1 = none; how sure it is, [n] float32, 0 to 1."""

    token_ids: np.ndarray
    scores: np.ndarray


class DraftChoice(Protocol):
    """Chooses drafts."""

    def begin(self, rows: np.ndarray, positions: np.ndarray) -> None:
        """Rows ([n], distinct) will be drafted for, from these positions ([n]) of their sequences on."""
        ...

    def choose(
        self, compute_logits: ComputeLogits, hidden: torch.Tensor, rows: np.ndarray, target_ids: TargetIds | None = None
    ) -> Chosen:
        """The next drafts of each of these rows, behind those that it has since `begin`.

        Args:
            compute_logits: gives [n * num_places, draft vocabulary]: of one row's places, then of the next row's.
            hidden: [n, ...], for `compute_logits`.
            rows: [n], distinct.
            target_ids: None = the draft vocabulary is the target's.
        """
        ...


class LikeliestTokens:
    """Implements `DraftChoice`; a score is the token's probability."""

    def __init__(self, ops: SamplingOps) -> None:
        self._ops = ops

    def begin(self, rows: np.ndarray, positions: np.ndarray) -> None:
        """As `DraftChoice`: nothing is kept."""

    def choose(
        self, compute_logits: ComputeLogits, hidden: torch.Tensor, rows: np.ndarray, target_ids: TargetIds | None = None
    ) -> Chosen:
        """As `DraftChoice`."""
        logits = self._ops.compute_logits(compute_logits, hidden)
        token_ids, logprobs = self._ops.likeliest(logits)
        scores = np.minimum(np.exp(logprobs), np.float32(1.0))
        is_number = (scores > 0) & (token_ids >= 0)  # of NaN nothing is true
        if not is_number.all():
            scores, token_ids = np.where(is_number, scores, 0.0), np.where(is_number, token_ids, -1)
        return Chosen(token_ids if target_ids is None else target_ids(token_ids), scores)


class DrawnTokens:
    """Implements `DraftChoice`: drafts are drawn at their requests' temperatures.

    Random requests' scores are the probability of the likeliest token in the first place, for all places: what they
    decide must not depend on what was drawn.
    """

    def __init__(self, ops: SamplingOps, drawn: DrawnDrafts) -> None:
        self._ops = ops
        self._drawn = drawn

    def begin(self, rows: np.ndarray, positions: np.ndarray) -> None:
        """As `DraftChoice`."""
        self._drawn.begin(rows, positions)

    def choose(
        self, compute_logits: ComputeLogits, hidden: torch.Tensor, rows: np.ndarray, target_ids: TargetIds | None = None
    ) -> Chosen:
        """As `DraftChoice`."""
        logits = self._ops.compute_logits(compute_logits, hidden)
        ids = None if target_ids is None else target_ids(np.arange(logits.shape[1], dtype=np.int32))
        logits = logits.view(len(rows), -1, logits.shape[1])
        token_ids = np.full(logits.shape[:2], -1, dtype=np.int32)
        scores = np.zeros(logits.shape[:2], dtype=np.float32)
        active = np.arange(len(rows))
        for place in range(logits.shape[1]):
            token_ids[active, place], scores[active, place] = self._drawn.draw(
                take_lines(logits[:, place], active), rows[active], ids
            )
            active = active[token_ids[active, place] >= 0]
        return Chosen(token_ids.ravel(), scores.ravel())
