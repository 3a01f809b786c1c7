"""Runs the model once before requests come, so that the first one does not pay for thread and library start-up."""

from __future__ import annotations

import numpy as np
import torch

from quire.core.scheduler_output import StateBlocks
from quire.models.interfaces import CausalLM
from quire.worker.attention_groups import AttentionGroups
from quire.worker.block_tables import BlockTables
from quire.worker.input_batch import InputBatch


@torch.inference_mode()
def warm_up(
    model: CausalLM, attention: AttentionGroups, block_tables: BlockTables, num_tokens: int, device: torch.device
) -> None:
    """A prompt of `num_tokens` tokens and a decode, on row 0 before it is used.

    Its blocks are all the null block, which nothing reads; `num_tokens` is at most a block, so that slots are distinct.
    """
    for start, end in ((0, num_tokens), (num_tokens - 1, num_tokens)):
        batch = _dummy_batch(start, end, device, sum(block_tables.has_state))
        hidden = model.forward(batch.input_ids, batch.positions, attention.forward_context(batch, block_tables))
        model.compute_logits(hidden[-1:])


def _dummy_batch(start: int, end: int, device: torch.device, num_state_groups: int) -> InputBatch:
    """One request whose tokens start .. end - 1 are computed."""
    null, anew = np.zeros(1, dtype=np.int32), np.full(1, -1, dtype=np.int32)
    positions = np.arange(start, end, dtype=np.int64)
    return InputBatch(
        rows=np.zeros(1, dtype=np.int32),
        num_computed_tokens=np.array([start], dtype=np.int32),
        query_start_loc=np.array([0, end - start], dtype=np.int32),
        seq_lens=np.array([end], dtype=np.int32),
        input_ids=torch.zeros(end - start, dtype=torch.int32, device=device),
        positions=torch.from_numpy(positions).to(device),
        token_rows=np.zeros(end - start, dtype=np.int32),
        token_positions=positions,
        sampling_rows=np.zeros(1, dtype=np.int32),
        sampling_positions=np.array([end], dtype=np.int32),
        logits_indices=np.array([end - start - 1], dtype=np.int64),
        states=(StateBlocks(null if start else anew, null),) * num_state_groups,
    )
