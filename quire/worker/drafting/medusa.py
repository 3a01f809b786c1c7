"""MedusaDrafts: heads on the target's last hidden state draft, all at once. Keeps nothing from step to step.

Called by the draft step after sampling. The hidden state from which a row's newest token was sampled lies in the step's
results: head i guesses the token i + 2 places behind it, so head 0 the one behind the newest.
"""

from __future__ import annotations

import numpy as np
import torch

from quire.attention.context import ForwardContext
from quire.core.scheduler_output import SchedulerOutput
from quire.models.heads.medusa import ComputeLogits, MedusaHeads
from quire.worker.device.draft_chains import DraftChains
from quire.worker.drafting.choice import Chosen, DraftChoice
from quire.worker.drafting.inputs import DraftInputs, ModelDrafts
from quire.worker.drafting.tree_drafts import MAX_LINES
from quire.worker.group_drafts import GroupDrafts


class MedusaDrafts:
    """Implements `DraftModel`.

    Args:
        compute_logits: the target's.
        at_once: the heads with their choice of tokens, for a few rows; None = they run call by call.
        group: the other ranks that compute the heads; None = there are none.
    """

    reads_all_states = False

    def __init__(
        self,
        heads: MedusaHeads,
        compute_logits: ComputeLogits,
        choice: DraftChoice,
        at_once: DraftChains | None = None,
        group: GroupDrafts | None = None,
    ) -> None:
        self._group = group
        self._heads = heads
        self._at_once = at_once
        self._compute_logits = compute_logits
        self._choice = choice

    def apply(self, scheduled: SchedulerOutput) -> None:
        """As `DraftModel`: there is nothing to keep."""

    def propose(self, inputs: DraftInputs) -> ModelDrafts:
        """As `DraftModel`."""
        if not len(inputs.rows):
            return ModelDrafts(*(np.empty(0, dtype=dtype) for dtype in (np.int32, np.int32, np.float32)))
        most = inputs.max_tokens.tolist()
        num_heads = min(self._heads.arch.num_heads, max(most))
        hidden = inputs.hidden
        if len(inputs.rows) == 1:
            end = int(inputs.hidden_ends[0])
            hidden = hidden[end - 1 : end]
        elif len(hidden) > 1:
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
        if min(most) >= num_heads and np.count_nonzero(token_ids < 0) == 0:
            return ModelDrafts(np.full(len(inputs.rows), num_heads, dtype=np.int32), token_ids, scores)
        shape = len(inputs.rows), num_heads
        token_ids, scores = token_ids.reshape(shape), scores.reshape(shape)
        is_draft = np.logical_and.accumulate(token_ids >= 0, axis=1)
        is_draft &= np.arange(num_heads) < inputs.max_tokens[:, None]
        return ModelDrafts(is_draft.sum(axis=1, dtype=np.int32), token_ids[is_draft], scores[is_draft])

    def _guess(self, hidden: torch.Tensor, rows: np.ndarray, num_heads: int) -> Chosen:
        """Tokens of the first heads: one row's, then the next one's."""
        found = None if self._at_once is None else self._chosen_at_once(self._at_once, hidden, rows, num_heads)
        if found is not None:
            return found
        if self._group is not None:
            of_group = self._group.compute_logits(hidden, num_heads)
            return self._choice.choose(lambda lines: of_group, hidden, rows)
        states = self._heads.states(hidden)[:, :num_heads]
        return self._choice.choose(lambda lines: self._heads.logits(lines, self._compute_logits), states, rows)

    def _chosen_at_once(
        self, heads: DraftChains, hidden: torch.Tensor, rows: np.ndarray, num_heads: int
    ) -> Chosen | None:
        size, one = self._heads.arch.num_heads, np.ones(len(rows), dtype=np.int32)
        found = heads.run(hidden[:, None].expand(-1, size, -1), rows, one, one, 0.0)
        if found is None:
            return None
        # The next run writes where these are.
        token_ids, scores = (of_all.reshape(-1, size)[:, :num_heads].flatten() for of_all in found)
        return Chosen(token_ids, scores)


class MedusaPass:
    """Heads as the model of a chain of one pass (`device.draft_chains.ChainModel`).

    A captured pass reads its inputs where they were when it was captured, so what is given of a row is its hidden state
    once for each head, which adds to it.

    Args:
        heads: with one block each, and the target's projection.
        compute_logits: the target's.
    """

    def __init__(self, heads: MedusaHeads, compute_logits: ComputeLogits) -> None:
        self._heads = heads
        self._compute_logits = compute_logits
        self.hidden_shape = heads.arch.num_heads, heads.hidden_size
        self.num_places = heads.arch.num_heads
        self.dtype = heads.dtype

    def forward(
        self, input_ids: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        """As `ChainModel`: there is one pass."""
        raise NotImplementedError

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """As `ChainModel`."""
        return self._heads.logits(self._heads.states(hidden[:, 0], hidden), self._compute_logits)
