"""SuffixProposer: drafts the most frequent continuations of a text's end, in the request and in past answers."""

from __future__ import annotations

import numpy as np

from quire.core.drafts import DraftRows, Proposals
from quire.core.engine_messages import EngineCoreRequest
from quire.kernels.histories import HistoryLimits, HistoryStats
from quire.spec_decode.answer_store import DEFAULT_STORE_BYTES, answer_namespace
from quire.spec_decode.histories import history_rows, make_histories, to_proposals


class SuffixProposer:
    """`DraftProposer` by suffix automata (Oliaro et al. 2024); arguments as vLLM's `suffix_decoding_*`.

    Args:
        num_speculative_tokens: most drafts of a row.
        max_tree_depth: tokens of context that are matched and counted.
        max_cached_requests: answers in the store; 0 = drafts come from the request's own text alone.
        max_cached_bytes: of the store.
        max_spec_factor: most drafts per token of the match.
        min_token_prob: a draft ends where its probability, as estimated from frequencies, falls below.
        share_answers: requests are drafted from answers of every tenant and cache salt.

    Attributes:
        histories: the index; an `NgramProposer` in the same chain can use it.
    """

    name = "suffix"

    def __init__(
        self,
        num_speculative_tokens: int,
        *,
        max_tree_depth: int = 24,
        max_cached_requests: int = 10_000,
        max_cached_bytes: int = DEFAULT_STORE_BYTES,
        max_spec_factor: float = 1.0,
        min_token_prob: float = 0.1,
        share_answers: bool = False,
    ) -> None:
        self._num_speculative_tokens = num_speculative_tokens
        self._rule = max_spec_factor, min_token_prob
        self._share_answers = share_answers
        self.histories = make_histories(
            HistoryLimits(
                max_context=max_tree_depth, max_store_bytes=max_cached_bytes, max_store_answers=max_cached_requests
            )
        )

    def begin(self, request: EngineCoreRequest) -> None:
        """A request arrived; its text is indexed when it first asks for drafts."""
        namespace = answer_namespace(request.tenant, request.cache_salt, is_shared=self._share_answers)
        self.histories.begin(request.handle, namespace)

    def propose(self, rows: DraftRows) -> Proposals:
        """As `DraftProposer.propose`."""
        asked = history_rows(rows, self._num_speculative_tokens)
        return to_proposals(self.histories.propose_suffix(asked, *self._rule))

    def end(self, handle: int, token_ids: np.ndarray, num_prompt_tokens: int) -> None:
        """Forget the request; its answer joins the store."""
        self.histories.end(handle, np.ascontiguousarray(token_ids[num_prompt_tokens:], dtype=np.int32))

    def stats(self) -> HistoryStats:
        """Memory and work, the store's included."""
        return self.histories.stats()
