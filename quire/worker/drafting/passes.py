"""Passes of a drafting model over tokens of some rows: inputs, attention metadata, hidden states.

Called by the models that draft. Owns nothing but references; the keys and values go to the rows' own blocks.
"""

from __future__ import annotations

import numpy as np
import torch

from quire.attention.context import ForwardContext
from quire.models.interfaces import CausalLM
from quire.worker.attention_groups import AttentionGroups
from quire.worker.block_tables import BlockTables
from quire.worker.device.graphs import StepGraphs
from quire.worker.input_batch import InputBatch


class DraftPasses:
    """Runs a language model on tokens of rows, beside the steps of the target.

    Args:
        attention: of the drafting model's layers alone.
        graphs: of the drafting model.
    """

    def __init__(
        self,
        model: CausalLM,
        attention: AttentionGroups,
        block_tables: BlockTables,
        graphs: StepGraphs,
        device: torch.device,
    ) -> None:
        self._model = model
        self._attention = attention
        self._block_tables = block_tables
        self._graphs = graphs
        self._device = device

    def forward(self, batch: InputBatch) -> torch.Tensor:
        """[num_tokens, hidden_size]; valid until the next pass."""
        hidden = self._graphs.forward(batch)
        if hidden is None:
            context = self._attention.forward_context(batch, self._block_tables)
            hidden = self._model.forward(batch.input_ids, batch.positions, context)
        return hidden

    def compute_logits(self, hidden_rows: torch.Tensor) -> torch.Tensor:
        """As `CausalLM.compute_logits`."""
        return self._model.compute_logits(hidden_rows)


class LanguageChain:
    """A language model as the model of a chain (`device.draft_chains.ChainModel`): its caches hold what was before."""

    num_places = 1

    def __init__(self, model: CausalLM, hidden_size: int, dtype: torch.dtype) -> None:
        self._model = model
        self.hidden_shape = (hidden_size,)
        self.dtype = dtype

    def forward(
        self, input_ids: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        """As `ChainModel`."""
        return self._model.forward(input_ids, positions, context)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """As `ChainModel`."""
        return self._model.compute_logits(hidden)


def make_batch(
    rows: np.ndarray, starts: np.ndarray, counts: np.ndarray, token_ids: np.ndarray, device: torch.device
) -> InputBatch:
    """A batch of `counts` tokens of each row from position `starts` on; all are [n], `token_ids` [sum of counts]."""
    if len(token_ids) == len(rows):  # one each
        query_start_loc = np.arange(len(rows) + 1, dtype=np.int32)
        positions, token_rows = starts.astype(np.int64), rows
    else:
        query_start_loc = np.zeros(len(rows) + 1, dtype=np.int32)
        np.cumsum(counts, out=query_start_loc[1:])
        positions = np.arange(len(token_ids), dtype=np.int64) + np.repeat(starts - query_start_loc[:-1], counts)
        token_rows = np.repeat(rows, counts)
    seq_lens = (starts + counts).astype(np.int32)
    return InputBatch(
        rows=rows,
        num_computed_tokens=starts.astype(np.int32),
        query_start_loc=query_start_loc,
        seq_lens=seq_lens,
        input_ids=torch.from_numpy(token_ids).to(device),
        positions=torch.from_numpy(positions).to(device),
        token_rows=token_rows,
        token_positions=positions,
        sampling_rows=rows,
        sampling_positions=seq_lens,
        logits_indices=query_start_loc[1:].astype(np.int64) - 1,
    )
