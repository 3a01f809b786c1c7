"""LateRows: hidden states on their way from the last pipeline stage to rank 0, of several steps.

Where a head drafts from states before some layers (`models.aux_states`), the stages that have these send them, too.

Made and called by the group's lead. No stage ever waits for rank 0: what is under way from it fits its mailbox, else
rank 0 takes some in before it sends the next step. So no two ranks wait for each other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from quire.config.pipeline import divide_layers
from quire.distributed.pipeline import PipelineStage
from quire.models.aux_states import AuxStates
from quire.worker.setup import WorkerSetup


class LateHidden:
    """The hidden states of one step; `take` waits for them.

    Args:
        num_tokens: of the step.
        index: [num_rows] int64, the tokens whose states come; those of others are zeros.
        own_aux: states before layers of the first stage, [num_tokens, hidden_size] each.
        has_aux: those of other stages come, too.

    Attributes:
        aux: once it is taken: as `AuxStates.tensors`.
    """

    def __init__(
        self,
        queue: LateRows,
        num_tokens: int,
        index: np.ndarray,
        own_aux: Sequence[torch.Tensor] = (),
        *,
        has_aux: bool = False,
    ) -> None:
        self._queue = queue
        self.num_tokens = num_tokens
        self.index = index
        self.aux = list(own_aux)
        self.has_aux = has_aux
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
        num_aux: of each stage, the layers before which states are sent; empty = of none.
    """

    def __init__(self, stage: PipelineStage, size: int, dtype: torch.dtype, num_aux: Sequence[int] = ()) -> None:
        self._stage = stage
        self._size = size
        self._dtype = dtype
        # By the first rank of each stage but rank 0, which has its own.
        self._num_aux = {number * stage.size: num for number, num in enumerate(num_aux) if number and num}
        self._under_way: deque[LateHidden] = deque()

    def make_room(self) -> None:
        """Before the next message is sent."""
        while not self._fits():
            self.receive_oldest()

    def _fits(self) -> bool:
        sources = {self._stage.last_lead, *self._num_aux}
        return all(self._stage.communicator.has_room_for(self._sizes(source)) for source in sources)

    def _sizes(self, source: int) -> list[int]:
        """Bytes of each tensor that is under way from a rank."""
        row_bytes, sizes = self._size * self._dtype.itemsize, list[int]()
        for late in self._under_way:
            sizes += [late.num_tokens * row_bytes] * (self._num_aux.get(source, 0) if late.has_aux else 0)
            if source == self._stage.last_lead:
                sizes.append(len(late.index) * row_bytes)
        return sizes

    def expect(self, num_tokens: int, index: np.ndarray, own_aux: Sequence[torch.Tensor] | None) -> LateHidden:
        """Of the step that was sent last.

        Args:
            own_aux: as of `LateHidden`; None = no stage sends any.
        """
        late = LateHidden(self, num_tokens, index, own_aux or (), has_aux=own_aux is not None)
        self._under_way.append(late)
        return late

    def receive_all(self) -> None:
        """Wait for all of them."""
        while self._under_way:
            self.receive_oldest()

    def receive_oldest(self) -> None:
        """Wait for it: from each stage in turn, the hidden states last."""
        late = self._under_way.popleft()
        num_aux: Mapping[int, int] = self._num_aux if late.has_aux else {}
        for source, num in num_aux.items():
            late.aux += [self._receive(late.num_tokens, source) for _ in range(num)]
        rows = self._receive(len(late.index), self._stage.last_lead)
        if len(rows) == late.num_tokens:
            late.hidden = rows
        else:
            late.hidden = rows.new_zeros(late.num_tokens, self._size).index_copy_(0, torch.from_numpy(late.index), rows)

    def _receive(self, num_rows: int, source: int) -> torch.Tensor:
        rows = torch.empty(num_rows, self._size, dtype=self._dtype)
        if num_rows:
            self._stage.communicator.receive(rows, source)
        return rows


def make_late_rows(stage: PipelineStage, setup: WorkerSetup, aux: AuxStates | None) -> LateRows:
    """What comes from other stages; `aux` = where states are left for what drafts."""
    parallel, arch = setup.config.parallel, setup.arch
    stages = divide_layers(arch, stage.num_stages, parallel.pipeline_layer_partition)
    num_aux = [] if aux is None else [sum(layer in layers for layer in aux.layers) for layers in stages]
    return LateRows(stage, arch.hidden_size, setup.dtype, num_aux)
