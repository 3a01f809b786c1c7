"""NgramProposer: drafts what followed the first earlier occurrence of the text's last n-gram (prompt lookup)."""

from __future__ import annotations

import numpy as np

from quire.core.drafts import DraftRows, Proposals
from quire.core.engine_messages import EngineCoreRequest
from quire.kernels.histories import Histories, HistoryLimits, HistoryStats
from quire.spec_decode.histories import history_rows, make_histories, to_proposals


class NgramProposer:
    """`DraftProposer` by prompt lookup, with vLLM's rule: the longest n-gram wins, of its occurrences the first.

    Args:
        num_speculative_tokens: most drafts of a row.
        prompt_lookup_min, prompt_lookup_max: of the n-gram's tokens; 1 <= min <= max.
        histories: an index that another proposer keeps, of contexts of at least `prompt_lookup_max` tokens; None = its
            own.

    Scores rise with the match: after n equal tokens the next one is equal with (n + 1) / (n + 2) (Laplace).

    Example: with n-grams of 2 to 4 tokens, `5 1 2 3 9 1 2` drafts `3 9 1 2`.
    """

    name = "ngram"

    def __init__(
        self,
        num_speculative_tokens: int,
        prompt_lookup_min: int = 5,
        prompt_lookup_max: int = 5,
        histories: Histories | None = None,
    ) -> None:
        self._num_speculative_tokens = num_speculative_tokens
        self._lengths = prompt_lookup_min, prompt_lookup_max
        self._owns_histories = histories is None
        self._histories = histories or make_histories(HistoryLimits(max_context=prompt_lookup_max))

    def begin(self, request: EngineCoreRequest) -> None:
        """Nothing: a text is indexed when it first asks for drafts."""

    def propose(self, rows: DraftRows) -> Proposals:
        """As `DraftProposer.propose`."""
        asked = history_rows(rows, self._num_speculative_tokens)
        return to_proposals(self._histories.propose_ngram(asked, *self._lengths))

    def end(self, handle: int, token_ids: np.ndarray, num_prompt_tokens: int) -> None:
        """Forget the request."""
        if self._owns_histories:
            self._histories.end(handle, np.empty(0, dtype=np.int32))

    def stats(self) -> HistoryStats:
        """Memory and work."""
        return self._histories.stats()
