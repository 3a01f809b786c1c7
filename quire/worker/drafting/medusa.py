"""MedusaDrafts: heads on the target's last hidden state draft, all at once. Keeps nothing from step to step.

Called by the draft step after sampling. The hidden state from which a row's newest token was sampled lies in the step's
results: head i guesses the token i + 2 places behind it, so head 0 the one behind the newest.
"""

from __future__ import annotations

import numpy as np
import torch

from quire.core.scheduler_output import SchedulerOutput
from quire.models.heads.medusa import ComputeLogits, MedusaHeads
from quire.worker.drafting.choice import Chosen, DraftChoice
from quire.worker.drafting.inputs import DraftInputs, ModelDrafts
from quire.worker.drafting.medusa_graphs import MedusaGraphs
from quire.worker.group_drafts import GroupDrafts

MAX_LINES = 256
"""Most rows of logits at once, which bounds their memory."""


class MedusaDrafts:
    """Implements `DraftModel`.

    Args:
        compute_logits: the target's.
        graphs: of the heads, if these all share its projection and have one block; None = they run call by call.
        group: the other ranks that compute the heads; None = there are none.
    """

    reads_all_states = False

    def __init__(
        self,
        heads: MedusaHeads,
        compute_logits: ComputeLogits,
        choice: DraftChoice,
        graphs: MedusaGraphs | None = None,
        group: GroupDrafts | None = None,
    ) -> None:
        self._group = group
        self._heads = heads
        self._graphs = graphs
        self._compute_logits = compute_logits
        self._choice = choice

    def apply(self, scheduled: SchedulerOutput) -> None:
        """As `DraftModel`: there is nothing to keep."""

    def propose(self, inputs: DraftInputs) -> ModelDrafts:
        """As `DraftModel`."""
        if not len(inputs.rows):
            return ModelDrafts(*(np.empty(0, dtype=dtype) for dtype in (np.int32, np.int32, np.float32)))
        num_heads = min(self._heads.arch.num_heads, int(inputs.max_tokens.max()))
        hidden = inputs.hidden
        if len(hidden) > 1:
            hidden = hidden.index_select(0, torch.from_numpy(inputs.hidden_ends - 1).to(hidden.device))
        self._choice.begin(inputs.rows, inputs.num_tokens)
        size = max(1, MAX_LINES // num_heads)
        if len(hidden) <= size:
            token_ids, scores = self._guess(hidden, inputs.rows, num_heads)
        else:
            parts = [
                self._guess(lines, inputs.rows[i * size : (i + 1) * size], num_heads)
                for i, lines in enumerate(torch.split(hidden, size))
            ]
            token_ids, scores = (np.concatenate(part) for part in zip(*parts, strict=True))
        if int(inputs.max_tokens.min()) >= num_heads and (token_ids >= 0).all():
            return ModelDrafts(np.full(len(inputs.rows), num_heads, dtype=np.int32), token_ids, scores)
        shape = len(inputs.rows), num_heads
        token_ids, scores = token_ids.reshape(shape), scores.reshape(shape)
        is_draft = np.logical_and.accumulate(token_ids >= 0, axis=1)
        is_draft &= np.arange(num_heads) < inputs.max_tokens[:, None]
        return ModelDrafts(is_draft.sum(axis=1, dtype=np.int32), token_ids[is_draft], scores[is_draft])

    def _guess(self, hidden: torch.Tensor, rows: np.ndarray, num_heads: int) -> Chosen:
        """Tokens of the first heads: one row's, then the next one's."""
        logits = None if self._graphs is None else self._graphs.logits(hidden)
        if logits is not None:
            if num_heads < self._heads.arch.num_heads:
                logits = logits.view(len(hidden), -1, logits.shape[1])[:, :num_heads].flatten(0, 1)
            found = logits
            return self._choice.choose(lambda lines: found, hidden, rows)
        if self._group is not None:
            of_group = self._group.compute_logits(hidden, num_heads)
            return self._choice.choose(lambda lines: of_group, hidden, rows)
        states = self._heads.states(hidden)[:, :num_heads]
        return self._choice.choose(lambda lines: self._heads.logits(lines, self._compute_logits), states, rows)
