"""Reference: the requests of a step with their states, one by one, as the twins of recurrent kernels walk them."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from quire.kernels.recurrent import RecurrentBatch


def each_request(batch: RecurrentBatch, states: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
    """(rows, state before, where the state after goes) of every request that has rows.

    Args:
        states: [num_blocks, ...]; the state before is a copy of one block, or zeros.
    """
    starts = batch.query_start_loc.tolist()
    for i, (read, written) in enumerate(zip(batch.read_blocks.tolist(), batch.write_blocks.tolist(), strict=True)):
        if starts[i] < starts[i + 1]:
            before = torch.zeros_like(states[0]) if read < 0 else states[read].clone()
            yield slice(starts[i], starts[i + 1]), before, states[written]
