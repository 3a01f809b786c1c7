"""GroupLead: rank 0's side of a group. Tells the other ranks what is computed, and computes its own part of it.

Made by the worker of rank 0, called by its model runner. When a call raises after its message was sent, the ranks
are no longer at the same place: the group is at an end, as when a rank dies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch

from quire.core.scheduler_output import BlockCopies, SchedulerOutput
from quire.distributed.communicator import Communicator
from quire.errors import EngineDeadError
from quire.models.interfaces import CausalLM
from quire.worker.block_tables import BlockTables
from quire.worker.group_messages import CopyBlocks, CopySlots, GroupMessage, Meet, SampleLogits, SwapBlocks
from quire.worker.group_steps import GroupStep
from quire.worker.input_batch import InputBatch
from quire.worker.late_rows import LateHidden, LateRows
from quire.worker.step_channel import StepChannel


class GroupLead:
    """Leads the other ranks.

    Args:
        communicator: to the other ranks that have the output projection, as this one has.
        channel: to the other ranks.
        step: computes this rank's part.
        block_tables: of all rows.
        abort: ends what other ranks wait for, naming a rank.
        all_ranks: to all other ranks; those of other pipeline stages have no output projection.
        late_rows: hidden states that come from another pipeline stage; None = they are computed here.
    """

    def __init__(
        self,
        communicator: Communicator,
        channel: StepChannel,
        model: CausalLM,
        step: GroupStep,
        block_tables: BlockTables,
        abort: Callable[[int], None],
        all_ranks: Communicator,
        late_rows: LateRows | None = None,
    ) -> None:
        self._communicator = communicator
        self._channel = channel
        self._model = model
        self._step = step
        self._block_tables = block_tables
        self._abort = abort
        self._all_ranks = all_ranks
        self._late_rows = late_rows

    def forward(self, batch: InputBatch, *, wants_all: bool) -> torch.Tensor | LateHidden:
        """The hidden states of a step, computed by all ranks."""
        message = self._step.message(batch, self._block_tables, wants_all=wants_all)
        with self.together("a step"):
            self.send(message)
            hidden = self._step.run(message, batch)
        if self._late_rows is None:
            return hidden
        index = np.arange(batch.num_tokens) if wants_all else batch.logits_indices
        return self._late_rows.expect(batch.num_tokens, index, self._step.own_aux() if wants_all else None)

    def take(self, hidden: LateHidden) -> torch.Tensor:
        """Those of a step, once the stages behind this one have computed it; what drafts finds its states, too."""
        with self.together("a step"):
            taken = hidden.take()
        if hidden.has_aux:
            self._step.put_aux(hidden.aux)
        return taken

    def take_all(self) -> None:
        """Take in the states of all steps: nothing is under way to this rank."""
        if self._late_rows is not None:
            self._late_rows.receive_all()

    def compute_logits(self, hidden_rows: torch.Tensor) -> torch.Tensor:
        """[num_logits, hidden_size] -> [num_logits, vocab_size], of which every rank computes a part."""
        num_rows, size = hidden_rows.shape
        with self.together("logits"):
            self._channel.send_to_stage(SampleLogits(num_rows, size))
            self._communicator.broadcast(hidden_rows.contiguous())
            return self._model.compute_logits(hidden_rows)

    def copy_blocks(self, copies: BlockCopies) -> None:
        """On the other ranks."""
        with self.together("copies of blocks"):
            self.send(CopyBlocks(copies.source_ids, copies.target_ids))

    def swap_blocks(self, scheduled: SchedulerOutput) -> None:
        """Of a step, on the other ranks."""
        outs, ins = scheduled.swap_outs, scheduled.swap_ins
        if len(outs) or len(ins):
            with self.together("swaps of blocks"):
                self.send(SwapBlocks(outs.source_ids, outs.target_ids, ins.source_ids, ins.target_ids))

    def copy_slots(self, slots: np.ndarray) -> None:
        """As `AttentionGroups.copy_slots`, on the other ranks."""
        with self.together("copies of drafts"):
            self.send(CopySlots(slots))

    @property
    def has_stages(self) -> bool:
        """Steps are under way when `forward` returns."""
        return self._late_rows is not None

    def send_to_stage(self, message: GroupMessage) -> None:
        """To the other ranks that have the same layers."""
        self._channel.send_to_stage(message)

    def send(self, message: GroupMessage) -> None:
        """To the other ranks, none of which waits for this one when it gets there."""
        if self._late_rows is not None:
            self._late_rows.make_room()
        self._channel.send(message)

    def meet(self) -> None:
        """Wait until every rank has done what was sent: their caches are at the same step."""
        with self.together("a barrier"):
            self.send(Meet())
            self._all_ranks.barrier()

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """What is computed by all ranks, or by none: any other error ends the group.

        Raises:
            EngineDeadError: it failed on this rank, or another has ended.
        """
        try:
            yield
        except EngineDeadError:
            raise
        except Exception as error:
            self._abort(0)
            raise EngineDeadError(
                f"{what} failed on rank 0, and the other ranks cannot be brought back to where it was: "
                f"{type(error).__name__}: {error}"
            ) from error


class LeadModel:
    """A model as sampling sees it: its logits come from all ranks."""

    def __init__(self, model: CausalLM, compute_logits: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._model = model
        self.compute_logits = compute_logits
        self.forward = model.forward
        self.kv_cache_specs = model.kv_cache_specs
        self.checkpoint_targets = model.checkpoint_targets
        self.ignored_tensors = model.ignored_tensors
        self.stored_tensors = model.stored_tensors
