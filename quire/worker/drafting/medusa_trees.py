"""MedusaTrees: Medusa heads draft several tokens for each place, as a tree of given paths. Keeps nothing.

Called by the draft step after sampling, in the place of `MedusaDrafts`. A path (i, j) is the i-th likeliest token of
the first head and behind it the j-th likeliest of the second, which knows nothing of the first: its chance is taken to
be the product. The likeliest paths come first, so a row that may have fewer drafts has the best of them.

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
from quire.worker.drafting.medusa import MAX_LINES
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
        paths = [path for path in tree if len(path) <= heads.arch.num_heads]
        number = {path: i for i, path in enumerate(paths)}
        self._parents = np.array([number.get(path[:-1], -1) for path in paths], dtype=np.int32)
        self._heads_of = np.array([len(path) - 1 for path in paths])
        self._ranks = np.array([path[-1] for path in paths])

    def apply(self, scheduled: SchedulerOutput) -> None:
        """As `DraftModel`: there is nothing to keep."""

    def propose(self, inputs: DraftInputs) -> ModelDrafts:
        """As `DraftModel`."""
        n, width = len(inputs.rows), len(self._parents)
        if not n:
            return ModelDrafts(*(np.empty(0, dtype=kind) for kind in (np.int32, np.int32, np.float32, np.int32)))
        token_ids, chances = self._paths(inputs)
        order = np.argsort(-chances, axis=1, kind="stable")  # as likely as its parent: behind it
        number = np.empty((n, width + 1), dtype=np.int32)
        np.put_along_axis(number, order, np.arange(width, dtype=np.int32)[None], axis=1)
        number[:, -1] = -1
        parents = np.take_along_axis(number, self._parents[order], axis=1)
        chances, token_ids = (np.take_along_axis(of, order, axis=1) for of in (chances, token_ids))
        counts = np.minimum(np.count_nonzero(chances > 0, axis=1), inputs.max_tokens).astype(np.int32)
        is_draft = np.arange(width) < counts[:, None]
        scores = chances.copy()
        np.divide(chances[:, 1:], chances[:, :-1], out=scores[:, 1:], where=chances[:, :-1] > 0)
        return ModelDrafts(counts, token_ids[is_draft], scores[is_draft].astype(np.float32), parents[is_draft])

    def _paths(self, inputs: DraftInputs) -> tuple[np.ndarray, np.ndarray]:
        """[n, num_paths] int32 last tokens of the paths, and their chances, float64; 0 = there is no such token."""
        index = torch.from_numpy(inputs.hidden_ends - 1).to(inputs.hidden.device)
        num_heads, count = int(self._heads_of.max()) + 1, int(self._ranks.max()) + 1
        rows = torch.split(inputs.hidden.index_select(0, index), max(1, MAX_LINES // num_heads))
        parts = zip(*(self._best(hidden, num_heads, count) for hidden in rows), strict=True)
        ids, probabilities = (np.concatenate(part).reshape(-1, num_heads, count) for part in parts)
        token_ids, chances = ids[:, self._heads_of, self._ranks], probabilities[:, self._heads_of, self._ranks]
        for path in np.flatnonzero(self._parents >= 0):  # parents come first
            chances[:, path] *= chances[:, self._parents[path]]
        return token_ids, chances

    def _best(self, hidden: torch.Tensor, num_heads: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """[n * num_heads, count] the likeliest tokens of the first heads and their probabilities; 0 = there is none."""
        if self._group is not None:
            logits = self._group.compute_logits(hidden, num_heads)
        else:
            states = self._heads.states(hidden)[:, :num_heads]
            logits = self._ops.compute_logits(lambda lines: self._heads.logits(lines, self._compute_logits), states)
        none, index = np.zeros(len(logits), dtype=np.int32), np.arange(len(logits), dtype=np.int32)
        lines = self._ops.gather_logprobs(logits, none, np.full_like(none, count), index, "raw_logprobs")
        token_ids, logprobs = lines.token_ids[:, 1:].astype(np.int32), lines.logprobs[:, 1:].astype(np.float64)
        is_token = np.isfinite(logprobs) & (token_ids >= 0)
        return np.where(is_token, token_ids, 0), np.where(is_token, np.exp(np.where(is_token, logprobs, 0.0)), 0.0)
