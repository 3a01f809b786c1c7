"""ModelRunner: the order of a step, nothing else.

Called by the worker, twice per step: `execute_model` computes, `sample_tokens` chooses. What each part does is in
the file named after it. Owns the rows and the block tables; a step between its two calls is its caller's.

A step in which row 0 decodes and row 1 computes the last 3 tokens of its prompt, at positions 5 to 7:

    _apply(scheduled)            # rows of ended requests are free, then new rows; block tables grow
    input_ids = [42, 7, 8, 9]    # the tokens of both rows in one line, without padding
    positions = [12, 5, 6, 7]
    query_start_loc = [0, 1, 4]  # row 0 has tokens 0 to 1, row 1 has 1 to 4
    _forward(batch)              # hidden states [4, hidden_size]; attention goes through the block tables
    sample_tokens(computed)      # logits of the last token of each row, [2, vocab_size], and one token id for each
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from quire.core.computed_step import ComputedStep
from quire.core.grammar_bitmask import GrammarBitmask
from quire.core.kv_transfer import KVTransferResults
from quire.core.model_drafts import DraftRequest
from quire.core.runner_output import ModelRunnerOutput
from quire.core.scheduler_output import SchedulerOutput
from quire.models.interfaces import CausalLM
from quire.sample.ops.interface import SamplingOps
from quire.sample.states import SamplingStates
from quire.utils.replaced import replaced
from quire.worker.attention_groups import AttentionGroups
from quire.worker.block_tables import BlockTables
from quire.worker.block_transfers import BlockTransfers, CopyTimes, no_copies
from quire.worker.device.graphs import StepGraphs
from quire.worker.draft_acceptance import DraftAcceptance
from quire.worker.draft_trees import along_paths
from quire.worker.drafting.draft_step import DraftStep
from quire.worker.drafting.inputs import DraftModel
from quire.worker.group_lead import GroupLead, LeadModel
from quire.worker.input_batch import InputBatch
from quire.worker.kv_tier import KVTierWorker, StackedTiers
from quire.worker.late_rows import LateHidden
from quire.worker.layer_hooks import LayerHooks
from quire.worker.prepare_inputs import prepare_inputs
from quire.worker.request_states import RequestStates
from quire.worker.sampling_step import SamplingStep


@dataclass(frozen=True, slots=True)
class _ComputedBatch(ComputedStep):
    """A step that was computed: `hidden` is [num_tokens, hidden_size], valid until the next one is.

    Where steps are replayed, `hidden` is where every step of its size leaves its result. Where pipeline stages
    compute it, it is on its way, and `finished` are the transfers that had ended by then.
    """

    batch: InputBatch
    hidden: torch.Tensor | LateHidden
    copy_times: CopyTimes
    draft_request: DraftRequest | None
    is_capture: bool
    finished: KVTransferResults | None


class ModelRunner:
    """Runs what the scheduler decided.

    Args:
        device: where the model is.
        sampling_ops, step_graphs: of that device.
        logprobs_mode: what log-probability fields hold.
        transfers: swaps blocks; None = there is no swap space.
        acceptance: a rule by which drafts stand; None = as they are sampled.
        group: the other ranks that compute the model; None = there are none.
        clock: seconds, for what drafting takes.
    """

    def __init__(
        self,
        model: CausalLM,
        requests: RequestStates,
        block_tables: BlockTables,
        sampling: SamplingStates,
        attention: AttentionGroups,
        device: torch.device,
        sampling_ops: SamplingOps,
        step_graphs: StepGraphs,
        logprobs_mode: str = "raw_logprobs",
        transfers: BlockTransfers | None = None,
        acceptance: DraftAcceptance | None = None,
        group: GroupLead | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._model = model
        self._group = group
        self._requests = requests
        self._block_tables = block_tables
        self._sampling = sampling
        self._attention = attention
        self._device = device
        self._acceptance = acceptance
        sampled = model if group is None else LeadModel(model, group.compute_logits)
        self._sampling_step = SamplingStep(
            sampled, requests, sampling, sampling_ops, logprobs_mode, acceptance, self._keep_paths
        )
        self._kept_tokens: np.ndarray | None = None
        self._step_graphs = step_graphs
        self._transfers = transfers
        self._kv_tier: KVTierWorker | None = None
        self._draft_step: DraftStep | None = None
        self._clock = clock

    def register_draft_model(self, model: DraftModel, block_size: int) -> None:
        """From now on draft behind steps that ask for it."""
        self._draft_step = DraftStep(model, self._requests, block_size)

    def register_kv_tier(self, tier: KVTierWorker) -> None:
        """From now on carry out the transfers of steps, those of tiers that are there already beside it."""
        self._kv_tier = tier if self._kv_tier is None else StackedTiers([self._kv_tier, tier])

    def shutdown_kv_tier(self) -> None:
        """The engine ends."""
        if self._kv_tier is not None:
            self._kv_tier.shutdown()

    @torch.inference_mode()
    def execute_model(self, scheduled: SchedulerOutput) -> ComputedStep:
        """Compute a step's tokens; what sampling needs is in the result."""
        copy_times = no_copies if self._transfers is None else self._swap(self._transfers, scheduled)
        if self._kv_tier is not None:
            self._kv_tier.begin_step()
            if scheduled.kv_transfers is not None:
                if self._group is not None:
                    self._group.meet()
                self._kv_tier.start_transfers(scheduled.kv_transfers)
        self._apply(scheduled)
        if self._draft_step is not None:
            self._draft_step.apply(scheduled)
        states = self._block_tables.states(scheduled.states)
        draft_states = self._block_tables.draft_states(scheduled.drafts)
        batch = prepare_inputs(scheduled, self._requests, self._device, states, draft_states)
        self._step_graphs.is_capture = False  # not every step is shown to them
        if not batch.num_reqs:
            hidden: torch.Tensor | LateHidden = torch.empty(0, device=self._device)
        else:
            hooks = None if self._kv_tier is None else self._kv_tier.layer_hooks()
            reads_all = self._draft_step is not None and self._draft_step.reads_all_states(scheduled)
            hidden = self._forward(batch, reads_all) if hooks is None else self._forward_with(hooks, batch)
        finished = None if self._kv_tier is None else self._finish_transfers(self._kv_tier)
        is_capture = self._step_graphs.is_capture
        return _ComputedBatch(batch, hidden, copy_times, scheduled.draft_request, is_capture, finished)

    def _finish_transfers(self, tier: KVTierWorker) -> KVTransferResults | None:
        """A step was computed. What has ended so far where the next step comes before this one is sampled, so that what
        failed in this one is reported with it; None = that is asked later.
        """
        has_stages = self._group is not None and self._group.has_stages
        if self._group is not None and has_stages and tier.reads_step:
            self._group.meet()
        tier.finish_forward()
        return tier.get_finished() if has_stages else None

    def _swap(self, transfers: BlockTransfers, scheduled: SchedulerOutput) -> CopyTimes:
        if self._group is not None:
            self._group.swap_blocks(scheduled)
        return transfers.run(scheduled)

    def _forward_with(self, hooks: LayerHooks, batch: InputBatch) -> torch.Tensor:
        """As `_forward`, call by call, with a connector's calls around each layer."""
        context = hooks.around(self._attention.forward_context(batch, self._block_tables))
        hidden = self._model.forward(batch.input_ids, batch.positions, context)
        hooks.leave()
        return hidden

    @torch.inference_mode()
    def sample_tokens(self, computed: ComputedStep, grammar: GrammarBitmask | None = None) -> ModelRunnerOutput:
        """Choose the tokens of a step that was computed; a step is sampled once."""
        assert isinstance(computed, _ComputedBatch), "a step is sampled by the runner that computed it"
        hidden = computed.hidden
        if isinstance(hidden, LateHidden):
            assert self._group is not None, "stages are a group"
            hidden = self._group.take(hidden)
        output = self._sampling_step.run(computed.batch, hidden, grammar)
        if self._draft_step is not None and computed.draft_request is not None:
            start = self._clock()
            batch, lines = computed.batch, None
            if batch.trees is not None:
                assert self._kept_tokens is not None and output.sampled_start_loc is not None, "it was sampled"
                batch, lines = along_paths(batch, self._kept_tokens, output.sampled_start_loc)
            drafts = self._draft_step.run(batch, hidden, output, computed.draft_request, lines)
            output = replaced(output, proposals=drafts, drafting_s=self._clock() - start)
        if computed.is_capture:
            output = dataclasses.replace(output, is_capture=True)
        if self._kv_tier is not None:
            finished = computed.finished
            output = dataclasses.replace(output, kv_transfers=finished or self._kv_tier.get_finished())
        if computed.copy_times is no_copies:
            return output
        swap_out_s, swap_in_s = computed.copy_times()
        return dataclasses.replace(output, swap_out_s=swap_out_s, swap_in_s=swap_in_s)

    def _keep_paths(self, batch: InputBatch, tokens: np.ndarray) -> None:
        """Of a step with trees, these tokens stand."""
        slots = self._attention.kept_slots(batch, self._block_tables, tokens)
        if slots.shape[1]:
            if self._group is not None:
                self._group.copy_slots(slots)
            self._attention.copy_slots(slots)
        self._kept_tokens = tokens

    def _forward(self, batch: InputBatch, reads_all: bool) -> torch.Tensor | LateHidden:
        """`reads_all`: hidden states of tokens that predict none will be read, too."""
        wanted = None if reads_all else self._wanted(batch)
        if self._group is not None:
            return self._group.forward(batch, wants_all=wanted is None)
        hidden = None if batch.trees is not None else self._step_graphs.forward(batch, wanted)
        if hidden is not None:
            return hidden
        context = self._attention.forward_context(batch, self._block_tables)
        if wanted is not None:
            context = dataclasses.replace(context, wanted=torch.from_numpy(wanted).to(self._device))
        return self._model.forward(batch.input_ids, batch.positions, context)

    def _wanted(self, batch: InputBatch) -> np.ndarray | None:
        """The tokens whose hidden states will be read, where they are few: those that predict tokens."""
        if 2 * len(batch.logits_indices) > batch.num_tokens:
            return None
        if (self._requests.num_prompt_logprobs[batch.rows] >= 0).any():
            return None
        return batch.logits_indices

    def _apply(self, scheduled: SchedulerOutput) -> None:
        """Bring rows and tables up to date: beams, frees, then additions, new blocks, copied blocks."""
        if scheduled.row_updates.chosen:
            self._requests.apply(scheduled.row_updates)
            for fork in scheduled.row_updates.forks:
                self._block_tables.set_row(fork.row, fork.block_ids)
        for row in scheduled.freed_rows.tolist():
            self._sampling.remove_row(row)
        if self._acceptance is not None:
            self._acceptance.forget(scheduled.freed_rows)
        for request in scheduled.new_reqs:
            self._requests.add_row(request)
            self._block_tables.set_row(request.row, request.block_ids)
            self._sampling.add_row(
                request.row,
                request.sampling_params,
                request.token_ids,
                request.num_prompt_tokens,
                request.seed,
                request.eos_token_id,
            )
        self._block_tables.append(scheduled.new_blocks)
        if len(scheduled.block_copies):
            if self._group is not None:
                self._group.copy_blocks(scheduled.block_copies)
            self._attention.copy_pages(scheduled.block_copies)
