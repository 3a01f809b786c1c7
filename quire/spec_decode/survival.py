"""Survival: how likely each draft is to stand, from what became of those before it.

Called by the draft controller. Owns counts of the whole population, by (source, length of the match, position in the
row's drafts, level of the proposer's score); no request has counts of its own, so a new one begins with the estimate of
the population. A cell that has seen nothing believes the proposer's score. What follows a draft that was wrong was not
observed and is not counted, neither for nor against.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import NamedTuple

import numpy as np

from quire.core.drafts import Proposals

MAX_SOURCES = 8
# Upper ends of the classes of match lengths and of positions, and of the levels of scores.
MATCH_ENDS = (1, 2, 3, 5, 9, 17, 33)
POSITION_ENDS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24)
SCORE_ENDS = (0.3, 0.6, 0.85)
NUM_MATCHES, NUM_POSITIONS, NUM_SCORES = len(MATCH_ENDS) + 1, len(POSITION_ENDS) + 1, len(SCORE_ENDS) + 1
# Observations that a proposer's score counts for.
PRIOR_WEIGHT = 2.0
# Share of a cell's counts that a step with new observations leaves: about the last 32 of such steps count.
KEPT_SHARE = 1.0 - 1 / 32
LEAST_SCORE, MOST_SCORE = 0.02, 0.995
# Up to so many drafts plain numbers are faster than arrays, whose every operation costs about as much as ten of those.
FEW = 48
_POSITION_CLASSES = tuple(bisect_right(POSITION_ENDS, position) for position in range(FEW))


class _Located(NamedTuple):
    """[num_drafts] position of each draft within its row, and its cell."""

    proposals: Proposals
    positions: np.ndarray
    cells: np.ndarray


class Survival:
    """Observed acceptance of drafts."""

    def __init__(self) -> None:
        num_cells = MAX_SOURCES * NUM_MATCHES * NUM_POSITIONS * NUM_SCORES
        self._observed = np.zeros(num_cells)
        self._accepted = np.zeros(num_cells)
        self._located: _Located | None = None
        self._few: tuple[Proposals, list[int]] | None = None

    def chances(self, proposals: Proposals) -> np.ndarray:
        """[num_drafts] float64: the chance that the draft stands together with all before it in its row."""
        if len(proposals.scores) <= FEW:
            return np.array(self.chances_of_few(proposals))
        counts = proposals.counts
        cells, scores = self._locate(proposals).cells, self._bounded(proposals.scores)
        each = (self._accepted[cells] + PRIOR_WEIGHT * scores) / (self._observed[cells] + PRIOR_WEIGHT)
        logs = np.cumsum(np.log(each))
        ends = np.cumsum(counts)
        before = np.concatenate(([0.0], logs))[ends - counts]  # of the rows before, for rows with drafts
        chances: np.ndarray = np.exp(logs - np.repeat(before, counts))
        return chances

    def chances_of_few(self, proposals: Proposals) -> list[float]:
        """`chances`, draft by draft."""
        accepted, observed = self._accepted, self._observed
        cells, found, scores, at = list[int](), list[float](), proposals.scores.tolist(), 0
        of_rows = zip(
            proposals.counts.tolist(), proposals.sources.tolist(), proposals.match_lengths.tolist(), strict=True
        )
        for count, source, match_length in of_rows:
            of_row = min(source, MAX_SOURCES - 1) * NUM_MATCHES + bisect_right(MATCH_ENDS, match_length)
            chance = 1.0
            for position in range(count):
                score = scores[at + position]
                of_position = of_row * NUM_POSITIONS + _POSITION_CLASSES[position]
                cell = of_position * NUM_SCORES + bisect_right(SCORE_ENDS, score)
                stood = accepted.item(cell) + PRIOR_WEIGHT * min(max(score, LEAST_SCORE), MOST_SCORE)
                chance *= stood / (observed.item(cell) + PRIOR_WEIGHT)
                cells.append(cell)
                found.append(chance)
            at += count
        self._few = proposals, cells
        return found

    def record(self, proposals: Proposals, kept: np.ndarray, accepted: np.ndarray) -> None:
        """Take in what became of drafts.

        Args:
            kept: [n] drafts of each row that were verified, the first ones; at most `proposals.counts`.
            accepted: [n] those of them that stood, at most `kept`.
        """
        if len(proposals.scores) <= FEW:
            self._record_few(proposals, kept, accepted)
            return
        _, positions, cells = self._locate(proposals)
        # The first draft that did not stand was observed, too.
        num_observed = np.repeat(np.minimum(kept, accepted + 1), proposals.counts)
        observed = cells[positions < num_observed]
        stood = cells[positions < np.repeat(accepted, proposals.counts)]
        num_cells = len(self._observed)
        counts, num_stood = np.bincount(observed, minlength=num_cells), np.bincount(stood, minlength=num_cells)
        touched = np.flatnonzero(counts)
        self._observed[touched] = KEPT_SHARE * self._observed[touched] + counts[touched]
        self._accepted[touched] = KEPT_SHARE * self._accepted[touched] + num_stood[touched]

    def _record_few(self, proposals: Proposals, kept: np.ndarray, accepted: np.ndarray) -> None:
        cells, at = self._cells_of_few(proposals), 0
        seen: dict[int, int] = {}
        stood: dict[int, int] = {}
        for count, num_kept, num_accepted in zip(
            proposals.counts.tolist(), kept.tolist(), accepted.tolist(), strict=True
        ):
            for position in range(min(num_kept, num_accepted + 1)):
                cell = cells[at + position]
                seen[cell] = seen.get(cell, 0) + 1
                stood[cell] = stood.get(cell, 0) + (position < num_accepted)
            at += count
        for cell, number in seen.items():
            self._observed[cell] = KEPT_SHARE * self._observed.item(cell) + number
            self._accepted[cell] = KEPT_SHARE * self._accepted.item(cell) + stood[cell]

    def _cells_of_few(self, proposals: Proposals) -> list[int]:
        """The cell of each draft, as `chances_of_few` has found them for the newest proposals."""
        if self._few is None or self._few[0] is not proposals:
            self.chances_of_few(proposals)
        assert self._few is not None, "it was set just now"
        return self._few[1]

    def _locate(self, proposals: Proposals) -> _Located:
        """Positions and cells of the drafts; those of the newest proposals are asked for twice."""
        if self._located is None or self._located.proposals is not proposals:
            positions = positions_of(proposals.counts)
            self._located = _Located(proposals, positions, self._cells(proposals, positions))
        return self._located

    def _cells(self, proposals: Proposals, positions: np.ndarray) -> np.ndarray:
        """[num_drafts] the cell of each draft."""
        sources = np.minimum(proposals.sources, MAX_SOURCES - 1)
        of_rows = sources * NUM_MATCHES + np.searchsorted(MATCH_ENDS, proposals.match_lengths, "right")
        cells: np.ndarray = np.repeat(of_rows, proposals.counts) * NUM_POSITIONS
        cells = (cells + np.searchsorted(POSITION_ENDS, positions, "right")) * NUM_SCORES
        cells = cells + np.searchsorted(SCORE_ENDS, proposals.scores, "right")
        return cells

    @staticmethod
    def _bounded(scores: np.ndarray) -> np.ndarray:
        """Nothing is certain."""
        bounded: np.ndarray = np.minimum(np.maximum(scores, LEAST_SCORE), MOST_SCORE)
        return bounded


def positions_of(counts: np.ndarray) -> np.ndarray:
    """[sum of counts] 0, 1, ... within each row."""
    starts = np.cumsum(counts) - counts
    positions: np.ndarray = np.arange(int(counts.sum())) - np.repeat(starts, counts)
    return positions
