"""RowProposer: a proposer of drafts that goes row by row, for tests."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from quire.core.drafts import DraftRows, Proposals, make_proposals
from quire.core.engine_messages import EngineCoreRequest


class RowProposer:
    """Implements `DraftProposer`.

    Args:
        propose_row: the drafts after [num_tokens] token ids, of which the first so many count.
    """

    name = "by row"

    def __init__(self, propose_row: Callable[[np.ndarray, int], np.ndarray]) -> None:
        self._propose_row = propose_row

    def begin(self, request: EngineCoreRequest) -> None:
        """Nothing."""

    def propose(self, rows: DraftRows) -> Proposals:
        """What `propose_row` says of each row."""
        lengths, limits = rows.num_tokens.tolist(), rows.max_tokens.tolist()
        return make_proposals(
            [
                self._propose_row(rows.token_ids[row, :length], most)[:most]
                for row, length, most in zip(rows.rows.tolist(), lengths, limits, strict=True)
            ]
        )

    def end(self, handle: int, token_ids: np.ndarray, num_prompt_tokens: int) -> None:
        """Nothing."""
