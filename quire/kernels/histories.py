"""What drafting from history takes and gives, native and reference alike. Plain arrays; no torch.

A history is the text of one request, indexed as it grows. An answer store keeps past answers by namespace: requests are
drafted from their own text and from answers of their own namespace, never from others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

MAX_CONTEXT = 1024
"""Largest `HistoryLimits.max_context`."""
MIN_STORE_BYTES = 1 << 20
"""Smallest `HistoryLimits.max_store_bytes`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryLimits:
    """What histories may cost.

    Attributes:
        max_context: tokens of context that are matched and counted, 1 to MAX_CONTEXT.
        max_indexed_tokens: of texts with many new tokens, so many are indexed in a call, of requests and of answers
            each; at least 1. A request gets drafts once all of its text is indexed.
        max_store_bytes: of past answers and their indices; at least MIN_STORE_BYTES.
        max_store_answers: 0 = past answers are not kept.
    """

    max_context: int
    max_indexed_tokens: int = 2048
    max_store_bytes: int = 64 << 20
    max_store_answers: int = 0


@dataclass(frozen=True, slots=True)
class HistoryRows:
    """Rows that ask for drafts.

    Attributes:
        rows: [num_rows] int64 indices into `token_ids`.
        handles: [num_rows] int64; requests. The text of a handle only ever grows.
        num_tokens: [num_rows] int32, at least 1.
        max_tokens: [num_rows] int32; most drafts of each.
        token_ids: [max_num_seqs, max_model_len] int32; none negative.
    """

    rows: np.ndarray
    handles: np.ndarray
    num_tokens: np.ndarray
    max_tokens: np.ndarray
    token_ids: np.ndarray


@dataclass(frozen=True, slots=True)
class HistoryDrafts:
    """Drafts of rows, in their order.

    Attributes:
        counts: [num_rows] int32.
        token_ids: [sum of counts] int32.
        scores: [sum of counts] float32; estimate that the draft stands if those before it do.
        match_lengths: [num_rows] int32; tokens at the end of the text that were found before, 0 where none is drafted.
    """

    counts: np.ndarray
    token_ids: np.ndarray
    scores: np.ndarray
    match_lengths: np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryStats:
    """What histories hold and have done.

    Attributes:
        num_requests: that began and have not ended.
        num_request_bytes: of their indices.
        num_indexed_tokens: of requests, so far.
        num_lookups: edges and links followed so far; a measure of work.
        num_store_bytes, num_store_answers: of the store.
        num_store_evictions: answers that were evicted so far.
        num_store_namespaces: that have answers or requests.
    """

    num_requests: int
    num_request_bytes: int
    num_indexed_tokens: int
    num_lookups: int
    num_store_bytes: int
    num_store_answers: int
    num_store_evictions: int
    num_store_namespaces: int


class Histories(Protocol):
    """The texts of unfinished requests and past answers. Not for several threads at once."""

    def begin(self, handle: int, namespace: bytes) -> None:
        """A request arrived, of this namespace; one that was not announced has its own text alone."""

    def propose_ngram(self, rows: HistoryRows, min_length: int, max_length: int) -> HistoryDrafts:
        """What follows the first occurrence of the longest n-gram that ends a row's text; own text only.

        Args:
            min_length, max_length: of the n-gram, 1 to `max_context`.

        Source: Saxena 2023 (prompt lookup decoding).
        """

    def propose_suffix(self, rows: HistoryRows, max_spec_factor: float, min_token_prob: float) -> HistoryDrafts:
        """The most frequent continuations of the ends of texts, in the request and in its namespace.

        Of every suffix of at most `max_context` tokens that occurred before a draft is made token by token: the most
        frequent continuation (of equals the latest) of the string so far. A token's score is its share of them. The
        draft with the largest expected number of tokens that stand is taken; of equals the longest match, then the
        request's own text.

        Args:
            max_spec_factor: most drafts per token of the match.
            min_token_prob: a draft ends where the product of its scores would fall below.

        Source: Oliaro et al. 2024 (SuffixDecoding), sections 3 and 4.
        """

    def end(self, handle: int, answer: np.ndarray) -> None:
        """A request ended; its answer, [num_tokens] int32, joins its namespace. Unknown handles are ignored."""

    def stats(self) -> HistoryStats:
        """What is held, and what has been done so far."""
