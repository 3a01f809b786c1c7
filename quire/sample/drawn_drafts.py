"""DrawnDrafts: what drafts were drawn from, kept on the worker until the step that verifies them.

Made where `draft_sample_method` is "probabilistic". A drafter calls `begin` for the rows that it drafts for and then
`draw`, in place of an argmax, once for each further draft; the sampling step asks with `of_lines`. Distributions never
pass through the scheduler. Owns one dense tensor, of which memory is taken where rows are written.

The scheduler may verify fewer drafts than were drawn. It then still matters what was drawn next: where that draft was
left out for what it is (a low score, a grammar), a token drawn in its place as if there had been none would make such
drafts too rare. So the first one that is left out is tested, too, which needs no further logits.

A model's own distribution is narrowed to what the request allows nowhere: what masks, penalties and filters drop has
p = 0, so such a draft does not stand.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from quire.sample.ops.torch_ops import draw_by_weight
from quire.sample.ragged import take_lines, to_device
from quire.sample.rejection_sampler import DraftedLines
from quire.sample.rng import STREAM_DRAFT, attempt, uniform
from quire.sample.states import FeatureFlag, SamplingStates

_NONE = -1


class Drawn(NamedTuple):
    """Drafts of n rows: ids [n] int32, -1 = there can be none, and how sure the drafter is, [n] float32, 0 to 1."""

    token_ids: np.ndarray
    scores: np.ndarray


class DrawnDrafts:
    """Draws drafts and remembers their distributions.

    Args:
        states: per-row parameters.
        max_num_drafts: drafts of a row in a step.
        device: where the drafter's logits are.
        is_block: they are judged together. A draft that does not stand was looked at then, so its position is drafted
            by another number in the next step; else it is by the same, and the same draft comes in the same place.
    """

    def __init__(
        self, states: SamplingStates, max_num_drafts: int, device: torch.device, *, is_block: bool = False
    ) -> None:
        max_num_seqs = len(states.flags)
        self._states = states
        self._is_block = is_block
        # Position of each row's first draft; _NONE = there are none.
        self._first = np.full(max_num_seqs, _NONE, dtype=np.int64)
        self._counts = np.zeros(max_num_seqs, dtype=np.int64)
        self._token_ids = np.zeros((max_num_seqs, max_num_drafts), dtype=np.int32)
        # Probability of the likeliest token in each row's first place.
        self._first_best = np.zeros(max_num_seqs, dtype=np.float32)
        self._probs = torch.empty(max_num_seqs * max_num_drafts, states.vocab_size, device=device)

    @property
    def num_bytes(self) -> int:
        """Most memory of the distributions."""
        return self._probs.numel() * self._probs.element_size()

    def begin(self, rows: np.ndarray, positions: np.ndarray) -> None:
        """Drafts will be drawn for [n] distinct rows; [n] `positions` of the first of each in its sequence."""
        self._first[rows] = positions
        self._counts[rows] = 0

    def draw(self, logits: torch.Tensor, rows: np.ndarray, ids: np.ndarray | None = None) -> Drawn:
        """The next draft of each row, at its request's temperature; the likeliest token for greedy requests.

        Args:
            logits: [n, draft vocabulary]; the drafter's.
            rows: [n] distinct rows that `begin` named, with fewer than `max_num_drafts` drafts each.
            ids: [draft vocabulary] int32; the target's ids of its tokens; None = the vocabulary is the target's.

        Returns:
            drafts; the scores of a random request depend on nothing that was drawn.
        """
        num_before = self._counts[rows]
        is_random = (self._states.flags[rows] & int(FeatureFlag.RANDOM)) != 0
        temperature = np.where(is_random, self._states.temperature[rows], 1.0).astype(np.float32)
        probs = torch.softmax(logits.float() / to_device(temperature, logits.device)[:, None], dim=1)
        best, at = (of.cpu().numpy() for of in probs.max(dim=1))
        is_number = np.isfinite(best)
        streams = attempt(STREAM_DRAFT, num_before if self._is_block else 0 * num_before)
        uniforms = uniform(self._states.seeds[rows], self._first[rows] + num_before, streams)
        token_ids = np.where(is_random, draw_by_weight(torch.nan_to_num(probs), uniforms), at)
        if ids is not None:
            columns = to_device(ids.astype(np.int64), probs.device)
            probs = probs.new_zeros(len(rows), self._probs.shape[1]).index_add_(1, columns, probs)
            token_ids = ids[token_ids]
        token_ids = np.where(is_number, token_ids, _NONE).astype(np.int32)
        self._probs[to_device(self._lines(rows, num_before), self._probs.device)] = probs
        self._token_ids[rows, num_before] = token_ids
        self._counts[rows] += is_number
        self._first_best[rows] = np.where(num_before == 0, best, self._first_best[rows])
        return Drawn(token_ids, np.where(is_random, self._first_best[rows], best).astype(np.float32))

    def forget(self, rows: np.ndarray) -> None:
        """The requests on these rows are gone."""
        self._first[rows] = _NONE

    def is_waiting(self, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """[n] bool: rows with drafts that were drawn for the tokens to be sampled at `positions` [n] and on."""
        found: np.ndarray = (self._first[rows] == positions) & (self._counts[rows] > 0)
        return found

    def of_lines(
        self, token_ids: np.ndarray, rows: np.ndarray, num_before: np.ndarray, is_drawn: np.ndarray
    ) -> DraftedLines:
        """What stands at [n] lines of logits, the drafts that were left out included.

        Args:
            token_ids: [n] int32; drafts that the step verifies; -1 = none, behind the last of a row.
            rows: [n].
            num_before: [n] integers; drafts of the row before the line.
            is_drawn: [n] bool; lines of rows whose drafts may be those drawn last; they are where all are the same.
        """
        drawn = np.flatnonzero(is_drawn & (num_before < self._counts[rows]))
        found = self._token_ids[rows[drawn], num_before[drawn]]
        is_other = (token_ids[drawn] >= 0) & (token_ids[drawn] != found)
        if is_other.any():
            is_kept = ~np.isin(rows[drawn], rows[drawn[is_other]])
            drawn, found = drawn[is_kept], found[is_kept]
        token_ids = token_ids.copy()
        token_ids[drawn] = found
        probs = take_lines(self._probs, self._lines(rows[drawn], num_before[drawn]))
        return DraftedLines(token_ids, num_before, drawn, probs)

    def _lines(self, rows: np.ndarray, num_before: np.ndarray) -> np.ndarray:
        lines: np.ndarray = rows.astype(np.int64) * self._token_ids.shape[1] + num_before
        return lines
