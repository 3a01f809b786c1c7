"""MedusaTrees: Medusa heads draft several tokens for each place, as a tree of given paths. Keeps nothing.

Called by the draft step after sampling, in the place of `MedusaDrafts`. A path (i, j) is the i-th likeliest token of
the first head and behind it the j-th likeliest of the second, which knows nothing of the first: its chance is taken to
be the product.

Source: Cai et al. 2024 (Medusa), section 2.1.2.
"""

from __future__ import annotations

import numpy as np
import torch

from quire.config.token_tree import Tree
from quire.core.scheduler_output import SchedulerOutput
from quire.models.heads.medusa import ComputeLogits, MedusaHeads
from quire.sample.ops.interface import SamplingOps
from quire.worker.drafting.inputs import DraftInputs, ModelDrafts
from quire.worker.drafting.tree_drafts import likeliest_paths, likely_tokens, paths_of
from quire.worker.group_drafts import GroupDrafts


class MedusaTrees:
    """Implements `DraftModel`.

    Args:
        compute_logits: the target's.
        tree: paths, parents first; those beyond the last head are left out.
        group: the other ranks that compute the heads; None = there are none.
    """

    reads_all_states = False

    def __init__(
        self,
        heads: MedusaHeads,
        compute_logits: ComputeLogits,
        ops: SamplingOps,
        tree: Tree,
        group: GroupDrafts | None = None,
    ) -> None:
        self._group = group
        self._heads = heads
        self._compute_logits = compute_logits
        self._ops = ops
        self._paths = paths_of(tree, heads.arch.num_heads)

    def apply(self, scheduled: SchedulerOutput) -> None:
        """As `DraftModel`: there is nothing to keep."""

    def propose(self, inputs: DraftInputs) -> ModelDrafts:
        """As `DraftModel`."""
        if not len(inputs.rows):
            return ModelDrafts(*(np.empty(0, dtype=kind) for kind in (np.int32, np.int32, np.float32, np.int32)))
        paths, index = self._paths, torch.from_numpy(inputs.hidden_ends - 1).to(inputs.hidden.device)
        lines, num_heads = inputs.hidden.index_select(0, index), paths.depth
        if self._group is None:
            lines = self._heads.states(lines)[:, :num_heads]
        found = likely_tokens(self._ops, self._logits, lines, paths.num_ranks, num_heads)
        ids, probabilities = (of_all.reshape(-1, num_heads, paths.num_ranks) for of_all in found)
        chances = probabilities[:, paths.depths - 1, paths.ranks]
        for path in np.flatnonzero(paths.parents >= 0):  # parents come first
            chances[:, path] *= chances[:, paths.parents[path]]
        return likeliest_paths(ids[:, paths.depths - 1, paths.ranks], chances, paths.parents, inputs.max_tokens)

    def _logits(self, lines: torch.Tensor) -> torch.Tensor:
        """[n * depth of the tree, vocab_size], from states before the projections, or the target's with a group."""
        if self._group is not None:
            return self._group.compute_logits(lines, self._paths.depth)
        return self._heads.logits(lines, self._compute_logits)
