"""LateRows: hidden states on their way from the last pipeline stage to rank 0, of several steps.

Made and called by the group's lead. The last stage never waits for rank 0: what is under way fits its mailbox, else
rank 0 takes some in before it sends the next step. So no two ranks wait for each other.
"""

from __future__ import annotations

from collections import deque

import numpy as np
import torch

from quire.distributed.pipeline import PipelineStage


class LateHidden:
    """The hidden states of one step; `take` waits for them.

    Args:
        num_tokens: of the step.
        index: [num_rows] int64, the tokens whose states come; those of others are zeros.
    """

    def __init__(self, queue: LateRows, num_tokens: int, index: np.ndarray) -> None:
        self._queue = queue
        self.num_tokens = num_tokens
        self.index = index
        self.hidden: torch.Tensor | None = None

    def take(self) -> torch.Tensor:
        """[num_tokens, hidden_size]."""
        while self.hidden is None:
            self._queue.receive_oldest()
        return self.hidden


class LateRows:
    """Those that are under way, in the order of their steps.

    Args:
        size, dtype: of hidden states.
    """

    def __init__(self, stage: PipelineStage, size: int, dtype: torch.dtype) -> None:
        self._stage = stage
        self._size = size
        self._dtype = dtype
        self._under_way: deque[LateHidden] = deque()

    def make_room(self) -> None:
        """Before the next step is sent."""
        while not self._stage.communicator.has_room_for([self._num_bytes(one) for one in self._under_way]):
            self.receive_oldest()

    def expect(self, num_tokens: int, index: np.ndarray) -> LateHidden:
        """Of the step that was sent last."""
        late = LateHidden(self, num_tokens, index)
        self._under_way.append(late)
        return late

    def receive_oldest(self) -> None:
        """Wait for it."""
        late = self._under_way.popleft()
        rows = torch.empty(len(late.index), self._size, dtype=self._dtype)
        if len(rows):
            self._stage.communicator.receive(rows, self._stage.last_lead)
        if len(rows) == late.num_tokens:
            late.hidden = rows
        else:
            late.hidden = rows.new_zeros(late.num_tokens, self._size).index_copy_(0, torch.from_numpy(late.index), rows)

    def _num_bytes(self, late: LateHidden) -> int:
        return len(late.index) * self._size * self._dtype.itemsize
