"""Reference: the requests of a step with their states, one by one, as the twins of recurrent kernels walk them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from quire.kernels.recurrent import RecurrentBatch


class RequestSteps(NamedTuple):
    """One request's tokens.

    Attributes:
        rows: of the step.
        before: the state before them, a copy of one block, or zeros.
        after: row -> where the state after it goes; of the last row, and of those whose state is kept.
    """

    rows: slice
    before: torch.Tensor
    after: dict[int, torch.Tensor]

    def leave(self, row: int, state: torch.Tensor) -> None:
        """This is the state after a row."""
        if row in self.after:
            self.after[row].copy_(state)


def each_request(batch: RecurrentBatch, states: torch.Tensor) -> Iterator[RequestSteps]:
    """Every request that has rows.

    Args:
        states: [num_blocks, ...].
    """
    kept = [] if batch.token_blocks is None else batch.token_blocks.tolist()
    after = {row: states[block] for row, block in enumerate(kept) if block >= 0}
    starts = batch.query_start_loc.tolist()
    for i, (read, written) in enumerate(zip(batch.read_blocks.tolist(), batch.write_blocks.tolist(), strict=True)):
        if starts[i] < starts[i + 1]:
            before = torch.zeros_like(states[0]) if read < 0 else states[read].clone()
            yield RequestSteps(slice(starts[i], starts[i + 1]), before, {**after, starts[i + 1] - 1: states[written]})
