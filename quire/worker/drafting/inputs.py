"""What a drafting model is given after a step was sampled, and what it gives: `DraftModel` and its values.

Made by `draft_step`. No state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch

from quire.core.scheduler_output import SchedulerOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftInputs:
    """What a drafting model may look at.

    Attributes:
        rows: [n] intp, distinct.
        num_tokens: [n] int32; tokens of each row, the newest included, whose keys and values are not computed.
        max_tokens: [n] int32, at least 1; most drafts of each.
        num_slots: [n] int32; for how many tokens the row has blocks.
        token_ids: [max_num_seqs, .] int32; tokens of every row, not to be written.
        hidden: [num_tokens, hidden_size] of the target, of the step's tokens; of a tree those that stand.
        hidden_ends: [n] int64; hidden[hidden_ends - 1] is that of each row's token before the newest.
        hidden_counts: [n] int32; so many of its tokens, the last of which is that one, were computed in this step.
        step_lines: [num_tokens] int64; which of the step's tokens they are; None = all in order.
    """

    rows: np.ndarray
    num_tokens: np.ndarray
    max_tokens: np.ndarray
    num_slots: np.ndarray
    token_ids: np.ndarray
    hidden: torch.Tensor
    hidden_ends: np.ndarray
    hidden_counts: np.ndarray
    step_lines: np.ndarray | None = None


class ModelDrafts(NamedTuple):
    """Drafts of rows, in their order.

    Attributes:
        counts: [n] int32.
        token_ids: [num_drafts] int32.
        scores: [num_drafts] float32; probabilities.
        parents: [num_drafts] int32; of trees, as in `core.model_drafts.RowDrafts`.
    """

    counts: np.ndarray
    token_ids: np.ndarray
    scores: np.ndarray
    parents: np.ndarray | None = None


class DraftModel(Protocol):
    """Drafts on the worker's side: a second model, or heads on the target's hidden states.

    Attributes:
        reads_all_states: it looks at `DraftInputs.hidden` of tokens that predict none, too.
    """

    reads_all_states: bool

    def apply(self, scheduled: SchedulerOutput) -> None:
        """Take in what a message does to rows and blocks; called in every step, once the tables have it."""
        ...

    def propose(self, inputs: DraftInputs) -> ModelDrafts:
        """Guesses for these rows; called after a step was sampled, not in every step."""
        ...
