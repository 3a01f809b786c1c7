"""MedusaGraphs: Medusa heads on few rows, with their logits, captured as a step is. Made with `MedusaDrafts`.

A captured step reads its inputs where they were when it was captured, so hidden states are copied to one place first:
as they are, and once for each head, which adds to them.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from quire.attention.context import ForwardContext
from quire.models.heads.medusa import ComputeLogits, MedusaHeads
from quire.worker.attention_groups import AttentionGroups
from quire.worker.block_tables import BlockTables
from quire.worker.device.graphs import MakeStepGraphs
from quire.worker.drafting.passes import make_batch
from quire.worker.input_batch import InputBatch
from quire.worker.warmup import capture_steps

MAX_ROWS = 16
"""Of a step that is captured: larger ones spend little of their time between kernels."""


class MedusaGraphs:
    """Implements `StepModel`, as which the heads are captured; a token of such a step is a row, its result logits.

    Args:
        heads: with one block each, and the target's projection.
        attention: of no layers.
    """

    def __init__(
        self,
        heads: MedusaHeads,
        compute_logits: ComputeLogits,
        make_graphs: MakeStepGraphs,
        attention: AttentionGroups,
        block_tables: BlockTables,
        device: torch.device,
    ) -> None:
        self._heads = heads
        self._compute_logits = compute_logits
        self._device = device
        dtype = heads.dtype
        self._hidden = torch.zeros(MAX_ROWS, heads.hidden_size, dtype=dtype, device=device)
        self._repeated = torch.zeros(MAX_ROWS, heads.arch.num_heads, heads.hidden_size, dtype=dtype, device=device)
        self._graphs = make_graphs(self, attention, block_tables)
        self._batches: dict[int, InputBatch] = {}

    def capture(self, sizes: Iterable[int]) -> None:
        """Capture steps of these numbers of rows."""
        capture_steps(self._graphs, sizes, self._device, [self._hidden, self._repeated])

    def logits(self, hidden_rows: torch.Tensor) -> torch.Tensor | None:
        """[n * num_heads, vocab_size] float32 of the rows' heads, valid until the next call; None = too many rows."""
        n = len(hidden_rows)
        if n > MAX_ROWS:
            return None
        self._hidden[:n].copy_(hidden_rows)
        self._repeated[:n].copy_(hidden_rows[:, None])
        return self._graphs.forward(self._batches.get(n) or self._make_batch(n))

    def _make_batch(self, n: int) -> InputBatch:
        """Rows of one token; graphs want to know no more of them, as nothing attends."""
        zeros = np.zeros(n, dtype=np.int32)
        batch = self._batches[n] = make_batch(np.arange(n), zeros, zeros + 1, zeros, self._device)
        return batch

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """As `StepModel`."""
        n = len(input_ids)
        return self._heads.logits(self._heads.states(self._hidden[:n], self._repeated[:n]), self._compute_logits)
