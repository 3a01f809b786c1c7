"""Chains of drafts of several rows while they grow, and which missing tokens are computed first. Arrays of numpy."""

from __future__ import annotations

import numpy as np

from quire.worker.drafting.inputs import ModelDrafts

LEAST_CHANCE = 0.25
"""Chance of a draft to stand, with all before it, under which none is computed behind it where a controller decides.

Of heads and small draft models a pass, with the draft's verification, costs about that share of a step.
"""


class Chains:
    """Drafts of n rows, one behind the other.

    Args:
        most: [n] int; most drafts of each row; 0 = none are wanted.
        least_chance: a chain ends with a draft whose chance, the product of the scores up to it, is less.

    Attributes:
        most: as given.
        counts: [n] int32; drafts of each row so far.
        token_ids: [n, largest of most] int32; those behind a row's last draft mean nothing.
    """

    def __init__(self, most: np.ndarray, least_chance: float = 0.0) -> None:
        width = max(1, int(most.max(initial=0)))
        self.most = most
        self._least_chance = least_chance
        self.counts = np.zeros(len(most), dtype=np.int32)
        self.token_ids = np.zeros((len(most), width), dtype=np.int32)
        self._scores = np.zeros((len(most), width), dtype=np.float32)
        self._chances = np.ones(len(most), dtype=np.float32)

    def extend(self, entries: np.ndarray, token_ids: np.ndarray, scores: np.ndarray) -> np.ndarray:
        """Put a draft behind the chains `entries` ([m]); those that go on. An id of -1 ends its chain."""
        is_token = token_ids >= 0
        entries, token_ids, scores = entries[is_token], token_ids[is_token], scores[is_token]
        places = self.counts[entries]
        self.token_ids[entries, places] = token_ids
        self._scores[entries, places] = scores
        self.counts[entries] = places + 1
        self._chances[entries] *= scores
        is_wanted = (places + 1 < self.most[entries]) & (self._chances[entries] >= self._least_chance)
        goes_on: np.ndarray = entries[is_wanted]
        return goes_on

    def extend_all(self, entries: np.ndarray, token_ids: np.ndarray, scores: np.ndarray) -> None:
        """Give empty chains, `entries` ([m]), as many of these drafts as `extend` would; both are [num_passes, m]."""
        is_token = token_ids >= 0
        goes_on = is_token & (np.cumprod(scores, axis=0) >= self._least_chance)
        is_draft = is_token & (np.arange(len(token_ids))[:, None] < self.most[entries])
        is_draft[1:] &= np.logical_and.accumulate(goes_on[:-1], axis=0)
        self.counts[entries] = is_draft.sum(axis=0)
        self.token_ids[entries, : len(token_ids)] = token_ids.T
        self._scores[entries, : len(token_ids)] = scores.T

    def newest(self, entries: np.ndarray) -> np.ndarray:
        """[m] int32; the last draft of each of these chains."""
        newest: np.ndarray = self.token_ids[entries, self.counts[entries] - 1]
        return newest

    def drafts(self) -> ModelDrafts:
        """The drafts of all rows."""
        is_draft = np.arange(self.token_ids.shape[1]) < self.counts[:, None]
        return ModelDrafts(self.counts, self.token_ids[is_draft], self._scores[is_draft])


def share_budget(missing: np.ndarray, budget: int) -> np.ndarray:
    """[n] how many of its `missing` ([n], at least 1) tokens each row computes now: those with the fewest first."""
    order = np.argsort(missing, kind="stable")
    before = np.cumsum(missing[order]) - missing[order]
    counts = np.zeros_like(missing)
    counts[order] = np.clip(budget - before, 0, missing[order])
    return counts


def ragged_tokens(token_ids: np.ndarray, rows: np.ndarray, starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """[sum of counts] int32; `counts` tokens of each row from position `starts` on, out of [max_num_seqs, .] ids."""
    shifts = starts - (np.cumsum(counts) - counts)
    positions = np.arange(int(counts.sum())) + np.repeat(shifts, counts)
    found: np.ndarray = token_ids[np.repeat(rows, counts), positions]
    return found
