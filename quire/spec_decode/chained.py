"""ChainedProposer: two proposers in turn, such as "suffix, else ngram". State: the two."""

from __future__ import annotations

import numpy as np

from quire.core.drafts import DraftProposer, DraftRows, Proposals
from quire.core.engine_messages import EngineCoreRequest


class ChainedProposer:
    """`DraftProposer` that asks the second where the first drafts nothing.

    `Proposals.sources` counts on: those of the second begin behind the first's.

    Args:
        num_first: sources of `first`: 1, or how many it chains.
    """

    def __init__(self, first: DraftProposer, second: DraftProposer, num_first: int = 1) -> None:
        self.name = f"{first.name},{second.name}"
        self._first, self._second = first, second
        self._num_first = num_first

    @property
    def parts(self) -> tuple[DraftProposer, DraftProposer]:
        """The two, in turn."""
        return self._first, self._second

    def begin(self, request: EngineCoreRequest) -> None:
        """Both may need it."""
        self._first.begin(request)
        self._second.begin(request)

    def end(self, handle: int, token_ids: np.ndarray, num_prompt_tokens: int) -> None:
        """Both may have it."""
        self._first.end(handle, token_ids, num_prompt_tokens)
        self._second.end(handle, token_ids, num_prompt_tokens)

    def propose(self, rows: DraftRows) -> Proposals:
        """As `DraftProposer.propose`."""
        first = self._first.propose(rows)
        is_missing = first.counts == 0
        if not is_missing.any():
            return first
        at = np.flatnonzero(is_missing)
        asked = DraftRows(rows.rows[at], rows.handles[at], rows.num_tokens[at], rows.max_tokens[at], rows.token_ids)
        second = self._second.propose(asked)
        if not len(second.token_ids):
            return first
        return _fill(first, at, second, self._num_first)


def _fill(first: Proposals, at: np.ndarray, second: Proposals, num_first: int) -> Proposals:
    """`first` with the rows at `at`, which are empty, from `second`."""
    counts, sources, match_lengths = first.counts.copy(), first.sources.copy(), first.match_lengths.copy()
    has_drafts = second.counts > 0
    filled = at[has_drafts]
    counts[filled] = second.counts[has_drafts]
    sources[filled] = second.sources[has_drafts] + num_first
    match_lengths[filled] = second.match_lengths[has_drafts]
    is_of_second = np.zeros(len(counts), dtype=np.bool_)
    is_of_second[filled] = True
    is_of_second = np.repeat(is_of_second, counts)
    token_ids = np.empty(len(is_of_second), dtype=np.int32)
    scores = np.empty(len(is_of_second), dtype=np.float32)
    token_ids[is_of_second], token_ids[~is_of_second] = second.token_ids, first.token_ids
    scores[is_of_second], scores[~is_of_second] = second.scores, first.scores
    return Proposals(counts, token_ids, scores, sources, match_lengths)
