"""Survival: how likely each draft is to stand, from what became of those before it.

Called by the draft controller. Owns counts of the whole population, by (source, length of the match, position in the
row's drafts, level of the proposer's score); no request has counts of its own, so a new one begins with the estimate of
the population. A cell that has seen nothing believes the proposer's score. What follows a draft that was wrong was not
observed and is not counted, neither for nor against.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from quire.core.drafts import Proposals

MAX_SOURCES = 8
# Upper ends of the classes of match lengths and of positions, and of the levels of scores.
MATCH_ENDS = np.array([1, 2, 3, 5, 9, 17, 33])
POSITION_ENDS = np.array([1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24])
SCORE_ENDS = np.array([0.3, 0.6, 0.85])
# Observations that a proposer's score counts for.
PRIOR_WEIGHT = 2.0
# Share of a cell's counts that a step with new observations leaves: about the last 32 of such steps count.
KEPT_SHARE = 1.0 - 1 / 32
LEAST_SCORE, MOST_SCORE = 0.02, 0.995


class _Located(NamedTuple):
    """[num_drafts] position of each draft within its row, and its cell."""

    proposals: Proposals
    positions: np.ndarray
    cells: np.ndarray


class Survival:
    """Observed acceptance of drafts."""

    def __init__(self) -> None:
        num_cells = MAX_SOURCES * (len(MATCH_ENDS) + 1) * (len(POSITION_ENDS) + 1) * (len(SCORE_ENDS) + 1)
        self._observed = np.zeros(num_cells)
        self._accepted = np.zeros(num_cells)
        self._located: _Located | None = None

    def chances(self, proposals: Proposals) -> np.ndarray:
        """[num_drafts] float64: the chance that the draft stands together with all before it in its row."""
        counts = proposals.counts
        if not len(proposals.scores):
            return np.empty(0)
        cells, scores = self._locate(proposals).cells, self._bounded(proposals.scores)
        each = (self._accepted[cells] + PRIOR_WEIGHT * scores) / (self._observed[cells] + PRIOR_WEIGHT)
        if len(counts) == 1:
            of_one: np.ndarray = np.multiply.accumulate(each)
            return of_one
        logs = np.cumsum(np.log(each))
        ends = np.cumsum(counts)
        before = np.concatenate(([0.0], logs))[ends - counts]  # of the rows before, for rows with drafts
        chances: np.ndarray = np.exp(logs - np.repeat(before, counts))
        return chances

    def record(self, proposals: Proposals, kept: np.ndarray, accepted: np.ndarray) -> None:
        """Take in what became of drafts.

        Args:
            kept: [n] drafts of each row that were verified, the first ones; at most `proposals.counts`.
            accepted: [n] those of them that stood, at most `kept`.
        """
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

    def _locate(self, proposals: Proposals) -> _Located:
        """Positions and cells of the drafts; those of the newest proposals are asked for twice."""
        if self._located is None or self._located.proposals is not proposals:
            positions = positions_of(proposals.counts)
            self._located = _Located(proposals, positions, self._cells(proposals, positions))
        return self._located

    def _cells(self, proposals: Proposals, positions: np.ndarray) -> np.ndarray:
        """[num_drafts] the cell of each draft."""
        sources = np.minimum(proposals.sources, MAX_SOURCES - 1)
        of_rows = sources * (len(MATCH_ENDS) + 1) + np.searchsorted(MATCH_ENDS, proposals.match_lengths, "right")
        cells: np.ndarray = np.repeat(of_rows, proposals.counts) * (len(POSITION_ENDS) + 1)
        cells = (cells + np.searchsorted(POSITION_ENDS, positions, "right")) * (len(SCORE_ENDS) + 1)
        cells = cells + np.searchsorted(SCORE_ENDS, proposals.scores, "right")
        return cells

    @staticmethod
    def _bounded(scores: np.ndarray) -> np.ndarray:
        """Nothing is certain."""
        bounded: np.ndarray = np.minimum(np.maximum(scores, LEAST_SCORE), MOST_SCORE)
        return bounded


def positions_of(counts: np.ndarray) -> np.ndarray:
    """[sum of counts] 0, 1, ... within each row."""
    if len(counts) == 1:
        return np.arange(counts[0])
    starts = np.cumsum(counts) - counts
    positions: np.ndarray = np.arange(int(counts.sum())) - np.repeat(starts, counts)
    return positions
