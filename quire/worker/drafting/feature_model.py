"""A head on features as a model and its graphs, to which its features are given before each pass.

Made by the drafter of a rank of a group, whose passes are those of any model (`group_steps`).
"""

from __future__ import annotations

import numpy as np
import torch

from quire.attention.context import ForwardContext
from quire.models.heads.feature_head import FeatureHead
from quire.worker.device.graphs import StepGraphs
from quire.worker.drafting.head_graphs import HeadGraphs
from quire.worker.input_batch import InputBatch


class FeatureModel:
    """Implements `StepModel`; owns the features of the newest pass."""

    def __init__(self, head: FeatureHead) -> None:
        self._head = head
        self.features = torch.empty(0)

    def give(self, given: torch.Tensor, are_states: bool) -> None:
        """The features of the next pass, or the target's states that they are made from: [num_tokens, .]."""
        self.features = self._head.features(given) if are_states else given

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """As `StepModel`."""
        found: torch.Tensor = self._head(input_ids, self.features, positions, context)
        return found

    def compute_logits(self, hidden_rows: torch.Tensor, num_places: int) -> torch.Tensor:
        """As `FeatureHead.compute_logits`, of one place."""
        return self._head.compute_logits(hidden_rows)


class FeatureGraphs(StepGraphs):
    """The head's captured passes, on the features that were given."""

    def __init__(self, model: FeatureModel, graphs: HeadGraphs) -> None:
        self._model = model
        self._graphs = graphs

    def forward(self, batch: InputBatch, wanted: np.ndarray | None = None) -> torch.Tensor | None:
        """As `StepGraphs`, all hidden states."""
        return self._graphs.run(batch, self._model.features)
