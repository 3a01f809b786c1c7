"""Runs the model before requests come: the first ones do not pay for thread and library start-up, nor those with drafts
for capturing their steps.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from quire.core.scheduler_output import StateBlocks
from quire.models.interfaces import CausalLM
from quire.worker.attention_groups import AttentionGroups
from quire.worker.block_tables import BlockTables
from quire.worker.device.graphs import StepGraphs
from quire.worker.input_batch import InputBatch


@torch.inference_mode()
def warm_up(
    model: CausalLM,
    attention: AttentionGroups,
    block_tables: BlockTables,
    num_tokens: int,
    device: torch.device,
    *,
    has_head: bool = True,
) -> None:
    """A prompt of `num_tokens` tokens and a decode, on row 0 before it is used.

    Its blocks are all the null block, which nothing reads; `num_tokens` is at most a block, so that slots are distinct.
    Without `has_head` logits are computed elsewhere.
    """
    for start, end in ((0, num_tokens), (num_tokens - 1, num_tokens)):
        batch = _dummy_batch(start, end, device, sum(block_tables.has_state))
        hidden = model.forward(batch.input_ids, batch.positions, attention.forward_context(batch, block_tables))
        if has_head:
            model.compute_logits(hidden[-1:])


@torch.inference_mode()
def capture_steps(graphs: StepGraphs, device: torch.device, inputs: Sequence[torch.Tensor] = ()) -> None:
    """Capture steps, and compare one of one token and one of several with the model; on the null block.

    Args:
        inputs: what the graphs read besides their batch; will be overwritten.
    """
    for size in (1, 2):
        for tensor in inputs:
            tensor.copy_(torch.linspace(-1.0, 1.0, tensor.numel()).view_as(tensor))
        graphs.forward(_dummy_batch(0, size, device, 0, is_verified=True))


def _dummy_batch(
    start: int, end: int, device: torch.device, num_state_groups: int, *, is_verified: bool = False
) -> InputBatch:
    """One request whose tokens start .. end - 1 are computed, and all but the first are drafts if they are verified."""
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
        logits_indices=np.arange(0 if is_verified else end - start - 1, end - start, dtype=np.int64),
        states=(StateBlocks(null if start else anew, null),) * num_state_groups,
    )
