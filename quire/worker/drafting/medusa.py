"""MedusaDrafts: heads on the target's last hidden state draft, all at once. Keeps nothing from step to step.

Called by the draft step after sampling. The hidden state from which a row's newest token was sampled lies in the step's
results: head i guesses the token i + 2 places behind it, so head 0 the one behind the newest.
"""

from __future__ import annotations

import numpy as np
import torch

from quire.core.scheduler_output import SchedulerOutput
from quire.models.heads.medusa import ComputeLogits, MedusaHeads
from quire.sample.ops.interface import SamplingOps
from quire.worker.drafting.inputs import DraftInputs, ModelDrafts
from quire.worker.drafting.passes import Likeliest, likeliest

MAX_LINES = 256
"""Most rows of logits at once, which bounds their memory."""


class MedusaDrafts:
    """Implements `DraftModel`.

    Args:
        compute_logits: the target's.
    """

    def __init__(self, heads: MedusaHeads, compute_logits: ComputeLogits, ops: SamplingOps) -> None:
        self._heads = heads
        self._compute_logits = compute_logits
        self._ops = ops

    def apply(self, scheduled: SchedulerOutput) -> None:
        """As `DraftModel`: there is nothing to keep."""

    def propose(self, inputs: DraftInputs) -> ModelDrafts:
        """As `DraftModel`."""
        if not len(inputs.rows):
            return ModelDrafts(*(np.empty(0, dtype=dtype) for dtype in (np.int32, np.int32, np.float32)))
        num_heads = min(self._heads.arch.num_heads, int(inputs.max_tokens.max()))
        index = torch.from_numpy(inputs.hidden_ends - 1).to(inputs.hidden.device)
        hidden = inputs.hidden.index_select(0, index)
        parts = [self._guess(rows, num_heads) for rows in torch.split(hidden, max(1, MAX_LINES // num_heads))]
        shape = len(inputs.rows), num_heads
        token_ids = np.concatenate([part.token_ids for part in parts]).reshape(shape)
        probabilities = np.concatenate([part.probabilities for part in parts]).reshape(shape)
        is_draft = np.logical_and.accumulate(token_ids >= 0, axis=1)
        is_draft &= np.arange(num_heads) < inputs.max_tokens[:, None]
        return ModelDrafts(is_draft.sum(axis=1, dtype=np.int32), token_ids[is_draft], probabilities[is_draft])

    def _guess(self, hidden: torch.Tensor, num_heads: int) -> Likeliest:
        """The likeliest tokens of the first heads: one row's, then the next one's."""
        states = self._heads.states(hidden)[:, :num_heads]
        return likeliest(self._ops, lambda rows: self._heads.logits(rows, self._compute_logits), states)
