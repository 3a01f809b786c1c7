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
from quire.worker.drafting.chain import Chains
from quire.worker.drafting.inputs import DraftInputs, ModelDrafts
from quire.worker.drafting.passes import likeliest


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
        chains = Chains(np.minimum(inputs.max_tokens, self._heads.arch.num_heads))
        hidden = inputs.hidden.index_select(0, torch.from_numpy(inputs.hidden_ends - 1).to(inputs.hidden.device))
        active, head = np.arange(len(inputs.rows)), 0
        while len(active):
            index = torch.from_numpy(active).to(hidden.device)
            states = self._heads.states(head, hidden if len(active) == len(hidden) else hidden.index_select(0, index))

            def logits_of(rows: torch.Tensor, head: int = head) -> torch.Tensor:
                return self._heads.logits(head, rows, self._compute_logits)

            best = likeliest(self._ops, logits_of, states)
            active = chains.extend(active, best.token_ids, best.probabilities)
            head += 1
        return chains.drafts()
