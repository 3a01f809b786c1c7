"""GraphsWithAux: captured steps of a target whose states before some layers are read, too.

Made by the worker where a head needs such states. A replay leaves them where the captured step did.
"""

from __future__ import annotations

import numpy as np
import torch

from quire.attention.context import ForwardContext
from quire.models.aux_states import AuxStates
from quire.worker.attention_groups import AttentionGroups
from quire.worker.block_tables import BlockTables
from quire.worker.device.graphs import MakeStepGraphs, StepGraphs, StepModel
from quire.worker.input_batch import InputBatch


class _NotedModel:
    """Implements `StepModel`; keeps what the first step of each size has left in `aux`."""

    def __init__(self, model: StepModel, aux: AuxStates) -> None:
        self._model = model
        self._aux = aux
        self.left: dict[int, list[torch.Tensor]] = {}

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """As the model."""
        hidden = self._model.forward(input_ids, positions, context)
        self.left.setdefault(len(input_ids), self._aux.tensors)
        return hidden


class GraphsWithAux(StepGraphs):
    """Other graphs, and what they leave in `aux`."""

    def __init__(
        self,
        make_graphs: MakeStepGraphs,
        model: StepModel,
        attention: AttentionGroups,
        block_tables: BlockTables,
        aux: AuxStates,
    ) -> None:
        self._model = _NotedModel(model, aux)
        self._graphs = make_graphs(self._model, attention, block_tables)
        self._aux = aux

    def forward(self, batch: InputBatch, wanted: np.ndarray | None = None) -> torch.Tensor | None:
        """As `StepGraphs`; heads read the states of all tokens."""
        self._aux.begin()
        hidden = self._graphs.forward(batch)
        self.is_capture, self.max_tokens = self._graphs.is_capture, self._graphs.max_tokens
        if hidden is not None and not self._aux.tensors:  # a replay leaves them where the largest step has
            self._aux.tensors = [states[: batch.num_tokens] for states in self._model.left[self.max_tokens]]
        return hidden
