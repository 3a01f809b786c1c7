"""FilteredProposer: another proposer, which is not asked for some requests. State: the other one."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from quire.core.drafts import DraftProposer, DraftRows, Proposals, make_proposals
from quire.core.engine_messages import EngineCoreRequest

_NO_DRAFTS = np.empty(0, dtype=np.int32)


class FilteredProposer:
    """`DraftProposer` that has no drafts for requests whose drafts could not be verified.

    Args:
        excluded: handles of those requests; looked at in every step.
    """

    def __init__(self, proposer: DraftProposer, excluded: Collection[int]) -> None:
        self.name = proposer.name
        self._proposer = proposer
        self._excluded = excluded

    def begin(self, request: EngineCoreRequest) -> None:
        """As `DraftProposer.begin`."""
        self._proposer.begin(request)

    def end(self, handle: int, token_ids: np.ndarray, num_prompt_tokens: int) -> None:
        """As `DraftProposer.end`: past answers are of use to others."""
        self._proposer.end(handle, token_ids, num_prompt_tokens)

    def propose(self, rows: DraftRows) -> Proposals:
        """As `DraftProposer.propose`."""
        if not self._excluded:
            return self._proposer.propose(rows)
        at = np.flatnonzero(~np.isin(rows.handles, list(self._excluded)))
        if not len(at):
            return make_proposals([_NO_DRAFTS] * len(rows.rows))
        asked = DraftRows(rows.rows[at], rows.handles[at], rows.num_tokens[at], rows.max_tokens[at], rows.token_ids)
        found = self._proposer.propose(asked)
        counts, sources, match_lengths = np.zeros((3, len(rows.rows)), dtype=np.int32)
        counts[at], sources[at], match_lengths[at] = found.counts, found.sources, found.match_lengths
        return Proposals(counts, found.token_ids, found.scores, sources, match_lengths)
