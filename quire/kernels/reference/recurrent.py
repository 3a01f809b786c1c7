"""Reference: the requests of a step with their states, one by one, as the twins of recurrent kernels walk them."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from quire.kernels.recurrent import RecurrentBatch


def each_request(batch: RecurrentBatch, states: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
    """(rows, state before, where the state after goes) of every request that has rows.

    Args:
        states: [num_blocks, ...]; the state before is a copy of one block, or zeros for a request that begins.
    """
    starts, lens = batch.query_start_loc.tolist(), batch.seq_lens.tolist()
    for i, (read, written) in enumerate(zip(batch.read_blocks.tolist(), batch.write_blocks.tolist(), strict=True)):
        rows = slice(starts[i], starts[i + 1])
        num_rows = rows.stop - rows.start
        if num_rows:
            is_new = lens[i] == num_rows
            yield rows, torch.zeros_like(states[0]) if is_new else states[read].clone(), states[written]
