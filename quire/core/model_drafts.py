"""Drafts of a model on the worker's side, as messages: a request with a step, drafts with its output.

Made by `executor.drafting` and by the worker. Arrays are not to be written after they were sent.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """Rows for which the model is to draft after a step was sampled; [n] int32 distinct rows, most drafts of each."""

    rows: np.ndarray
    max_tokens: np.ndarray


@dataclass(frozen=True, slots=True)
class RowDrafts:
    """Drafts behind the newest tokens of rows.

    Attributes:
        rows: [n] int32; of those asked for, the ones that got a token.
        num_tokens: [n] int32; tokens of each row, the newest included: drafts are of no use behind others.
        counts: [n] int32; drafts of each.
        token_ids: [sum of counts] int32.
        scores: [sum of counts] float32; the model's probability of each.
        parents: [sum of counts] int32; of trees (`core.draft_trees`): which of its row's drafts each follows, -1 = the
            newest token; the likeliest paths come first, and the products of scores are theirs. None = chains.
    """

    rows: np.ndarray
    num_tokens: np.ndarray
    counts: np.ndarray
    token_ids: np.ndarray
    scores: np.ndarray
    parents: np.ndarray | None = None
