"""Makes the index that history proposers draft from: the native one, or its twin in Python where there is none."""

from __future__ import annotations

import numpy as np

from quire.core.drafts import DraftRows, Proposals
from quire.errors import NativeLibraryError
from quire.kernels.histories import Histories, HistoryDrafts, HistoryLimits, HistoryRows
from quire.kernels.native.histories import NativeHistories
from quire.kernels.reference.histories import ReferenceHistories
from quire.logger import get_logger

logger = get_logger(__name__)


def make_histories(limits: HistoryLimits) -> Histories:
    """The native index; without the native library a search in Python, which takes milliseconds per request."""
    try:
        return NativeHistories(limits)
    except NativeLibraryError as cause:
        logger.warning("drafts from history are searched in Python, which is slow: %s", cause)
        return ReferenceHistories(limits)


def history_rows(rows: DraftRows, num_speculative_tokens: int) -> HistoryRows:
    """`rows` with at most so many drafts each."""
    max_tokens = rows.max_tokens.clip(max=num_speculative_tokens)
    return HistoryRows(rows.rows, rows.handles, rows.num_tokens, max_tokens, rows.token_ids)


def to_proposals(drafts: HistoryDrafts) -> Proposals:
    """Drafts of a proposer that stands alone: source 0."""
    sources = np.zeros_like(drafts.counts)
    return Proposals(drafts.counts, drafts.token_ids, drafts.scores, sources, drafts.match_lengths)
