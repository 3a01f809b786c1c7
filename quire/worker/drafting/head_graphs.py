"""HeadGraphs: small steps of a head on features, captured as those of a model are. Made with `FeatureDrafts`.

A captured step reads its inputs where they were when it was captured, so features are copied to one place first.
"""

from __future__ import annotations

import torch

from quire.attention.context import ForwardContext
from quire.models.heads.feature_head import FeatureHead
from quire.worker.attention_groups import AttentionGroups
from quire.worker.block_tables import BlockTables
from quire.worker.device.graphs import MakeStepGraphs
from quire.worker.input_batch import InputBatch
from quire.worker.warmup import capture_steps

MAX_TOKENS = 64
"""Of a step that is captured: larger ones spend little of their time between kernels."""


class HeadGraphs:
    """Implements `StepModel`, as which the head is captured.

    Args:
        attention: of the head's layer alone.
    """

    def __init__(
        self,
        head: FeatureHead,
        make_graphs: MakeStepGraphs,
        attention: AttentionGroups,
        block_tables: BlockTables,
        device: torch.device,
    ) -> None:
        self._head = head
        self._features = torch.zeros(MAX_TOKENS, head.arch.hidden_size, dtype=head.dtype, device=device)
        self._device = device
        self._graphs = make_graphs(self, attention, block_tables, MAX_TOKENS)

    def capture(self) -> None:
        """Before the first step."""
        capture_steps(self._graphs, self._device, [self._features])

    def run(self, batch: InputBatch, features: torch.Tensor) -> torch.Tensor | None:
        """As `FeatureHead.forward`, for rows whose slots are their positions; valid until the next step, None = not one
        that is captured.
        """
        if batch.num_tokens > MAX_TOKENS:
            return None
        self._features[: batch.num_tokens].copy_(features)
        return self._graphs.forward(batch)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """As `StepModel`."""
        found: torch.Tensor = self._head(input_ids, self._features[: len(input_ids)], positions, context)
        return found
