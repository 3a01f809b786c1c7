"""GraphsWithAux: captured steps of a target whose states before some layers are read, too.

Made by the worker where a head needs such states. A replay leaves them where the captured step did.
"""

from __future__ import annotations

import torch

from quire.models.aux_states import AuxStates
from quire.worker.device.graphs import StepGraphs
from quire.worker.input_batch import InputBatch


class GraphsWithAux(StepGraphs):
    """Other graphs, and what they leave in `aux`."""

    def __init__(self, graphs: StepGraphs, aux: AuxStates) -> None:
        self._graphs = graphs
        self._aux = aux
        self._captured: dict[int, list[torch.Tensor]] = {}

    def forward(self, batch: InputBatch) -> torch.Tensor | None:
        """As `StepGraphs`."""
        self._aux.begin()
        hidden = self._graphs.forward(batch)
        self.is_capture = self._graphs.is_capture
        if hidden is None:
            return None
        # The first step of a size is captured while it runs; a later one that runs, too, is compared with its replay.
        captured = self._captured.setdefault(batch.num_tokens, self._aux.tensors)
        if not self._aux.tensors:
            self._aux.tensors = captured
        return hidden
