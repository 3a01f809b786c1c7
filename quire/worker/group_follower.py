"""GroupFollower: a rank other than 0. Computes its part of what rank 0 tells it to, until the process ends.

Made by the worker of such a rank. Owns nothing of requests.
"""

from __future__ import annotations

import time

import numpy as np
import torch

from quire.core.scheduler_output import BlockCopies
from quire.distributed.communicator import Communicator
from quire.models.interfaces import CausalLM
from quire.worker.attention_groups import AttentionGroups
from quire.worker.block_transfers import BlockTransfers
from quire.worker.group_calls import GroupCalls
from quire.worker.group_drafts import GroupDrafts
from quire.worker.group_messages import (
    CallWorker,
    CopyBlocks,
    CopySlots,
    DraftForward,
    DraftLogits,
    EndCall,
    ForwardStep,
    JoinPass,
    Meet,
    ProfileSteps,
    SampleLogits,
    SwapBlocks,
)
from quire.worker.group_profile import GroupProfile
from quire.worker.group_steps import GroupStep
from quire.worker.lock_step import ReplicaLockStep
from quire.worker.step_channel import StepChannel


class GroupFollower:
    """Runs after rank 0.

    Args:
        communicator: to the other ranks that have the same layers.
        all_ranks: to all other ranks.
        dtype: of hidden states.
        drafts: of a model that drafts.
        profile: records what is computed, where rank 0 says so.
        calls: runs functions, where rank 0 says so.
        transfers: swaps blocks; None = there is no swap space.
        lock_step: with other replicas; None = this one computes by itself.
    """

    def __init__(
        self,
        communicator: Communicator,
        all_ranks: Communicator,
        channel: StepChannel,
        model: CausalLM,
        step: GroupStep,
        attention: AttentionGroups,
        dtype: torch.dtype,
        drafts: GroupDrafts,
        profile: GroupProfile,
        calls: GroupCalls,
        transfers: BlockTransfers | None = None,
        lock_step: ReplicaLockStep | None = None,
    ) -> None:
        self._communicator = communicator
        self._all_ranks = all_ranks
        self._channel = channel
        self._model = model
        self._step = step
        self._attention = attention
        self._dtype = dtype
        self._drafts = drafts
        self._profile = profile
        self._calls = calls
        self._transfers = transfers
        self._lock_step = lock_step

    @torch.inference_mode()
    def run(self) -> EndCall:
        """Do what rank 0 says; ends with a call of the scripts, or with an error, when the group does."""
        while True:
            message = self._channel.receive()
            if isinstance(message, ForwardStep):
                start_ns = time.perf_counter_ns()
                self._step.run(message, self._step.batch_of(message))
                self._profile.note_forward(start_ns, len(message.input_ids))
            elif isinstance(message, SampleLogits):
                hidden = torch.empty(message.num_rows, message.size, dtype=self._dtype)
                self._communicator.broadcast(hidden)
                self._model.compute_logits(hidden)
            elif isinstance(message, CopyBlocks):
                self._attention.copy_pages(BlockCopies(message.source_ids, message.target_ids))
            elif isinstance(message, DraftForward | DraftLogits):
                self._drafts.follow(message)
            elif isinstance(message, CopySlots):
                self._attention.copy_slots(np.array(message.slots))
            elif isinstance(message, ProfileSteps):
                self._profile.follow(message)
            elif isinstance(message, CallWorker):
                self._calls.follow(message)
            elif isinstance(message, Meet):
                self._all_ranks.barrier()
            elif isinstance(message, EndCall):
                return message
            elif isinstance(message, JoinPass):
                assert self._lock_step is not None, "rank 0 has other replicas, as all have"
                self._lock_step.pass_empty()
            else:
                assert isinstance(message, SwapBlocks), "the cache is allocated once"
                self._swap(message)

    def _swap(self, message: SwapBlocks) -> None:
        assert self._transfers is not None, "rank 0 has a swap space, as all have"
        self._transfers.swap(
            BlockCopies(message.out_source_ids, message.out_target_ids),
            BlockCopies(message.in_source_ids, message.in_target_ids),
        )
