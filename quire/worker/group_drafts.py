"""GroupDrafts: what ranks compute together of a model that drafts. Rank 0 drafts, and sends what each pass needs.

Made by the worker of every rank of a group; the drafter gives it its part when it starts. Other ranks keep weights and
their part of the cache, and nothing of requests, as for the target (`group_lead`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from quire.distributed.communicator import Communicator
from quire.worker.block_tables import BlockTables
from quire.worker.group_lead import GroupLead
from quire.worker.group_messages import DraftForward, DraftLogits, TreeSegments
from quire.worker.group_steps import GroupStep, PlacedTables, StepTables
from quire.worker.input_batch import InputBatch

DraftLogitsOf = Callable[[torch.Tensor, int], torch.Tensor]
"""[n, hidden_size] of some rows, number of places -> [n * places, draft vocabulary]; on rank 0 alone they are whole."""
Give = Callable[[torch.Tensor, bool], None]
"""What a head is given beside tokens, before its pass: [num_tokens, .], and whether these are states of the target."""


class GroupDrafts:
    """Both sides: rank 0 calls `forward` and `compute_logits`, the follower of another rank `follow`.

    Args:
        communicator: to the other ranks of the first pipeline stage, or of the only one: they have what drafts.
        lead: rank 0's way to them.
        block_tables: of all rows.
        dtype: of hidden states.

    Attributes:
        tables: of the steps; graphs of the drafting model are made with them.
    """

    def __init__(
        self,
        communicator: Communicator,
        lead: GroupLead,
        tables: StepTables,
        block_tables: BlockTables,
        dtype: torch.dtype,
    ) -> None:
        self.tables = tables
        self._communicator = communicator
        self._lead = lead
        self._block_tables = block_tables
        self._dtype = dtype
        self._logits_of: DraftLogitsOf | None = None
        self._step: GroupStep | None = None
        self._give: Give | None = None

    def start(self, logits_of: DraftLogitsOf, step: GroupStep | None = None, give: Give | None = None) -> None:
        """From now on compute these.

        Args:
            step: passes of the model; None = it has none.
            give: None = it takes in tokens alone.
        """
        self._logits_of, self._step, self._give = logits_of, step, give

    def forward(
        self,
        batch: InputBatch,
        given: torch.Tensor | None = None,
        *,
        are_states: bool = False,
        placed: Mapping[int, PlacedTables] | None = None,
        segments: TreeSegments | None = None,
    ) -> torch.Tensor:
        """A pass of all ranks: [num_tokens, hidden_size]; valid until the next.

        Args:
            given: [num_tokens, .]; features, or with `are_states` the target's states that they are made from.
            placed, segments: as of `GroupStep.message`.
        """
        assert self._step is not None, "the model has passes"
        width = 0 if given is None else given.shape[1]
        step = self._step.message(batch, self._block_tables, wants_all=True, placed=placed, segments=segments)
        with self._lead.together("a draft"):
            self._lead.send_to_stage(DraftForward(step, width, are_states))
            if given is not None:
                given = given.contiguous()
                self._communicator.broadcast(given)
            return self._run(self._step, DraftForward(step, width, are_states), batch, given)

    def compute_logits(self, hidden_rows: torch.Tensor, num_places: int = 1) -> torch.Tensor:
        """[n, hidden_size] -> [n * num_places, draft vocabulary]."""
        num_rows, size = hidden_rows.shape
        with self._lead.together("logits of drafts"):
            self._lead.send_to_stage(DraftLogits(num_rows, size, num_places))
            self._communicator.broadcast(hidden_rows.contiguous())
            assert self._logits_of is not None, "the drafter has started"
            return self._logits_of(hidden_rows, num_places)

    def follow(self, message: DraftForward | DraftLogits) -> None:
        """Compute this rank's part of what rank 0 has sent."""
        if isinstance(message, DraftLogits):
            assert self._logits_of is not None, "the drafter has started"
            self._logits_of(self._receive(message.num_rows, message.size), message.num_places)
            return
        assert self._step is not None, "the model has passes"
        batch = self._step.batch_of(message.step)
        given = self._receive(batch.num_tokens, message.width) if message.width else None
        self._run(self._step, message, batch, given)

    def _run(
        self, step: GroupStep, message: DraftForward, batch: InputBatch, given: torch.Tensor | None
    ) -> torch.Tensor:
        if given is not None:
            assert self._give is not None, "the model takes in more than tokens"
            self._give(given, message.are_states)
        return step.run(message.step, batch)

    def _receive(self, num_rows: int, width: int) -> torch.Tensor:
        rows = torch.empty(num_rows, width, dtype=self._dtype)
        self._communicator.broadcast(rows)
        return rows
