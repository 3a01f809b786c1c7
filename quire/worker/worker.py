"""Worker: one device, the model on it, its memory, and the runner of its steps.

Made and called by an executor. Owns the model and the KV cache for the life of the process.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from quire.attention.sparse import BlockTopK
from quire.config.engine import QuireConfig
from quire.config.kv_transfer import KVTransferConfig
from quire.config.profiler import ProfilerConfig
from quire.core.computed_step import ComputedStep
from quire.core.draft_trees import num_scratch_blocks
from quire.core.engine_messages import EngineCoreOutputs
from quire.core.expert_group import ExpertGroup
from quire.core.grammar_bitmask import GrammarBitmask
from quire.core.kv_spec import AttentionSpec, KVCacheConfig, KVCacheSpec
from quire.core.memory_parts import MemoryPart
from quire.core.runner_output import ModelRunnerOutput
from quire.core.scheduler_output import SchedulerOutput
from quire.core.step_perf import WeightBytes
from quire.core.worker_call import WorkerCall
from quire.distributed.communicator import Communicator
from quire.distributed.parallel_context import ParallelContext
from quire.distributed.seat import Seat
from quire.errors import ConfigError, UnsupportedError
from quire.kv_offload.store import BlockStore
from quire.kv_transfer.connector import KVConnectorRole
from quire.kv_transfer.layout import KVCacheLayout
from quire.kv_transfer.registry import connector_class, make_connector
from quire.logger import get_logger
from quire.models.decoder import DecoderForCausalLM
from quire.models.loader import load_model
from quire.platforms.interface import Platform
from quire.sample.logits_processor import ProcessorKind
from quire.sample.states import SamplingStates
from quire.utils.memory import HUGE_PAGES
from quire.worker.allocator import keep_freed_memory
from quire.worker.attention_groups import AttentionGroups
from quire.worker.block_tables import BlockTables
from quire.worker.block_transfers import BlockTransfers
from quire.worker.connector_worker import ConnectorWorker
from quire.worker.device.aux_graphs import GraphsWithAux
from quire.worker.device.cache_identity import cache_identity
from quire.worker.device.graphs import StepGraphs, no_graphs
from quire.worker.device.profiling import Profile
from quire.worker.device.recording import Recording
from quire.worker.device.registry import make_device_ops
from quire.worker.draft_acceptance import DraftAcceptance, acceptance_options
from quire.worker.drafting.choice import DraftChoice, DrawnTokens, LikeliestTokens
from quire.worker.drafting.loading import PREFIX as DRAFT_PREFIX
from quire.worker.drafting.loading import DrafterCache, find_drafter, load_drafter, make_aux_states
from quire.worker.group_caches import caches_of_group
from quire.worker.group_calls import GroupCalls, reply_to, values_of
from quire.worker.group_drafts import GroupDrafts
from quire.worker.group_follower import GroupFollower
from quire.worker.group_lead import GroupLead
from quire.worker.group_messages import EndCall, InitCache, JoinPass, StageReport
from quire.worker.group_profile import GroupProfile
from quire.worker.group_steps import GroupStep, StepTables
from quire.worker.kv_cache_tensors import stored_spec
from quire.worker.kv_layout import ConnectorCaches, describe_layout
from quire.worker.kv_tier import AnyBlocks, KVTierWorker
from quire.worker.late_rows import make_late_rows
from quire.worker.lock_step import LockStepModel, ReplicaLockStep
from quire.worker.memory_planner import MemoryPlanner
from quire.worker.model_runner import ModelRunner
from quire.worker.offloading import OffloadingWorker
from quire.worker.request_states import RequestStates
from quire.worker.setup import make_setup
from quire.worker.step_channel import StepChannel
from quire.worker.warmup import capture_steps, warm_up
from quire.worker.weight_bytes import count_weights

logger = get_logger(__name__)


class Worker:
    """Loads the model; runs its steps once it was given a KV cache.

    Args:
        config: resolved: nothing in it is "auto" or missing.
        platform: the machine, with the config's device.
        custom_processors: logits processors of the engine's owner.
        seat: this process's place among those that compute the model; None = it does so alone.
        experts: the place of these among replicas that share experts; None = they have all.

    Raises:
        ModelError: the model directory or its weights are unusable.
        NotEnoughMemoryError: weights and workspace do not fit.
    """

    def __init__(
        self,
        config: QuireConfig,
        platform: Platform,
        custom_processors: Sequence[type[ProcessorKind]] = (),
        seat: Seat | None = None,
        experts: ExpertGroup | None = None,
    ) -> None:
        keep_freed_memory()
        self._setup = setup = make_setup(config, platform, seat, experts)
        self._custom_processors = tuple(custom_processors)
        self._acceptance = acceptance_options(config.speculative)
        self._ops = ops = make_device_ops(setup)
        drafter_files = find_drafter(setup)
        own_files = drafter_files if ops.stage is None or ops.stage.is_first else None
        self._memory = MemoryPlanner(setup, ops, None if own_files is None else own_files.arch)
        self._memory.check_weights_fit()
        self._model = load_model(
            setup.arch,
            config.model_path,
            config.load,
            setup.dtype,
            ops.device,
            ParallelContext(setup.rank % setup.stage_size, setup.stage_size, ops.stage),
            ops.attention,
            setup.limits.max_model_len,
            config.model.seed,
            ops.layers,
            packing_cache=ops.packing_cache,
            reports_error=config.model.quantization_report,
        )
        self._drafter = load_drafter(own_files, setup, ops, self._model)
        self._aux = make_aux_states(drafter_files, self._drafter, setup.arch.num_layers)
        if self._aux is not None:
            assert isinstance(self._model, DecoderForCausalLM), "heads need a decoder"
            self._model.model.aux_states = self._aux
        self._lock_step: ReplicaLockStep | None = None
        self._step_model = self._model
        if ops.experts is not None:
            self._lock_step = ReplicaLockStep(ops.experts, self.model, setup.dtype)
            self._step_model = LockStepModel(self._model, ops.experts)
        self._channel = StepChannel(ops.communicator, ops.stage)
        self._stages: list[StageReport] | None = None
        self._runner: ModelRunner | Profile[ModelRunner] | None = None
        self._follower: GroupFollower | None = None
        self._group_profile: GroupProfile | None = None
        self._calls: GroupCalls | None = None
        self._blocks: AnyBlocks | None = None
        self._kv_cache_config: KVCacheConfig | None = None
        self._connector_caches: ConnectorCaches | None = None

    @property
    def model(self) -> torch.nn.Module:
        """The loaded model."""
        assert isinstance(self._model, torch.nn.Module)
        return self._model

    @property
    def lock_step(self) -> ReplicaLockStep | None:
        """With replicas that share experts; None = there are none."""
        return self._lock_step

    @property
    def communicator(self) -> Communicator:
        """To the other processes that compute the model."""
        return self._ops.all_ranks

    def abort(self, rank: int) -> None:
        """A process that computes the model has ended: what waits for it fails and names it. From any thread."""
        self._ops.abort(rank)

    @property
    def silence(self) -> tuple[int, float] | None:
        """As `Communicator.silence`."""
        return self._ops.all_ranks.silence

    def communication_s(self) -> float:
        """Seconds that this rank has spent in collectives so far, waits for other ranks included."""
        return self._ops.communicator.busy_s

    def await_cache(self) -> None:
        """Allocate the KV cache as rank 0 says, and be ready to follow it. For ranks other than 0, once.

        Raises:
            CommunicationError: the group has ended.
        """
        stage = self._ops.stage
        if stage is not None and not stage.is_first and self._ops.communicator.rank == 0:
            self._channel.report(self._own_stage())
        first = self._channel.receive()
        assert isinstance(first, InitCache), "rank 0 begins with the cache"
        self.initialize_kv_cache(first.kv_cache)

    def follow(self) -> EndCall:
        """Compute what rank 0 says, until the group ends, or a call of the scripts of all ranks.

        Raises:
            CommunicationError: the group has ended.
        """
        assert self._follower is not None, "await_cache comes before"
        return self._follower.run()

    def end_call(self, outputs: EngineCoreOutputs | None, value: bool | None, is_last: bool) -> None:
        """Rank 0, where every rank has a script: what a call came to, for the others; as `EndCall`."""
        self._channel.send(EndCall(outputs, value, is_last))

    def kv_cache_specs(self) -> dict[str, KVCacheSpec]:
        """Layer name -> what it needs from the KV cache, in layer order; behind them those of a drafting model.

        On rank 0 of several pipeline stages: the layers of all of them.

        Raises:
            UnsupportedError: a layer is of a kind that this worker cannot store.
        """
        if self._ops.stage is None or self._setup.rank:
            return self._own_specs()
        specs = {name: spec for report in self._all_stages() for name, spec in report.specs.items()}
        return dict(sorted(specs.items(), key=lambda one: one[0].startswith(DRAFT_PREFIX)))

    def _own_specs(self) -> dict[str, KVCacheSpec]:
        """Of the layers that are here."""
        specs = self._model.kv_cache_specs(self._setup.block_size)
        if self._drafter is not None:
            specs = {**specs, **self._drafter.kv_cache_specs(self._setup.block_size)}
        dtype_bytes = self._setup.kv_cache_dtype.itemsize
        return {name: stored_spec(name, spec, dtype_bytes) for name, spec in specs.items()}

    def collective_rpc(self, call: WorkerCall) -> list[Any]:
        """Rank 0: what the function returns on each rank; raises as `GroupCalls.call`."""
        return values_of([reply_to(self, call)]) if self._calls is None else self._calls.call(call)

    def measure_limits(self) -> tuple[float, float] | None:
        """Operations and bytes a second that this rank's device does at most; None = that cannot be measured here."""
        return None if self._ops.measure_limits is None else self._ops.measure_limits()

    def weight_bytes(self) -> WeightBytes:
        """What this rank has loaded of the model."""
        return count_weights(self.model)

    def start_profile(self) -> bool:
        """Record steps from the next one on; False where a profile is taken, or has no place to go."""
        config, runner = self._setup.config.observability.profiler, self._ready_runner()
        if config is None or isinstance(runner, Profile):
            return False
        self._runner = Profile(config, runner, self._record, self.stop_profile, self._group_profile)
        return True

    def stop_profile(self) -> str | None:
        """Write what was recorded; the file, "" where there is none, None where no profile is taken."""
        profile = self._runner
        if not isinstance(profile, Profile):
            return None
        self._runner = profile.runner
        try:
            return str(profile.stop() or "")
        except OSError as error:
            logger.error("the profile cannot be written: %s", error)
        return ""

    def _record(self, config: ProfilerConfig, rank: int) -> Recording:
        return Recording(config, self._ops.runtime, rank)

    def memory_parts(self) -> dict[MemoryPart, int]:
        """What this process has asked memory for, in bytes; the KV cache, its swap space and captures at their most."""
        in_form = {} if self._drafter is None else {MemoryPart.DRAFTS: self._drafter.stored_tensors()}
        names = {name for name, _ in self.model.named_parameters()}
        stored = self._model.stored_tensors()
        in_form[MemoryPart.WEIGHTS] = {name: one for name, one in stored.items() if name in names}
        in_form[MemoryPart.PACKED_WEIGHTS] = {name: one for name, one in stored.items() if name not in names}
        parts = {part: sum(map(_num_bytes, tensors.values())) for part, tensors in in_form.items()}
        cache = self._kv_cache_config
        if cache is not None:
            parts[MemoryPart.KV_CACHE] = cache.total_bytes
            parts[MemoryPart.SWAP_SPACE] = cache.swap_bytes
            parts[MemoryPart.CAPTURES] = self._ops.graph_bytes
        return {**parts, MemoryPart.HUGE_PAGES_ASKED: HUGE_PAGES.asked_bytes}

    def available_kv_cache_bytes(self) -> int:
        """Bytes the KV cache may take; logs how they were found.

        On a CPU no more than `max_num_seqs` requests of `max_model_len` tokens could fill: memory that the engine
        does not need belongs to others.
        """
        if self._ops.stage is not None:
            return self._memory.bytes_of_stages(self._all_stages())
        return self._memory.available_kv_cache_bytes(self._weights_bytes(), self._own_specs())

    def _weights_bytes(self) -> int:
        tensors = list(self._model.stored_tensors().values())
        if self._drafter is not None:
            tensors += self._drafter.stored_tensors().values()
        return sum(map(_num_bytes, tensors))

    def _own_stage(self) -> StageReport:
        return StageReport(self._own_specs(), self._memory.spare_bytes(self._weights_bytes()))

    def _all_stages(self) -> list[StageReport]:
        """Rank 0: of every pipeline stage, asked once."""
        if self._stages is None:
            self._stages = [self._own_stage(), *self._channel.take_reports()]
        return self._stages

    @property
    def _sees_all_caches(self) -> bool:
        """Rank 0 has the KV caches of all ranks."""
        seat = self._setup.seat
        return seat is None or seat.size == 1 or bool(seat.cache_fds)

    def _layers_of_stages(self) -> list[list[str]]:
        """Rank 0: names of the layers with a cache of every pipeline stage."""
        specs = [self._own_specs()] if self._ops.stage is None else [one.specs for one in self._all_stages()]
        return [list(one) for one in specs]

    def initialize_kv_cache(self, kv_cache_config: KVCacheConfig) -> None:
        """Allocate the cache and the swap space, make the rows, warm up.

        Raises:
            NotEnoughMemoryError: the cache is larger than what is free.
        ConfigError: trees cannot be drafted for this model.
        """
        is_group = self._setup.num_ranks > 1
        layer_names = list(self._own_specs())
        own_config = kv_cache_config if self._ops.stage is None else kv_cache_config.of_layers(layer_names)
        self._memory.check_allocation(own_config)
        if is_group and not self._setup.rank:
            self._channel.send(InitCache(kv_cache_config))
        all_layers, self._kv_cache_config = kv_cache_config, own_config
        kv_cache_config = own_config
        setup, ops, vocab_size = self._setup, self._ops, self._setup.arch.vocab_size
        max_num_seqs, max_model_len = setup.limits.max_num_seqs, setup.limits.max_model_len
        kv_caches = ops.memory.allocate_kv_caches(kv_cache_config, layer_names, ops.attention, setup.kv_cache_dtype)
        num_own = len(self._model.kv_cache_specs(setup.block_size))
        own_caches = kv_caches.by_layer[:num_own]
        scratch_ids = self._scratch_ids(kv_cache_config)
        attention = AttentionGroups(kv_cache_config, layer_names[:num_own], own_caches, kv_caches.pools, scratch_ids)
        block_tables = BlockTables(kv_cache_config, max_num_seqs, max_model_len)
        sampling = SamplingStates(
            max_num_seqs, vocab_size, ops.device, self._custom_processors, ops.sampling.apply_penalties_inplace
        )
        step_tables = StepTables(kv_cache_config, max_num_seqs, max_model_len) if is_group else block_tables
        make_graphs = ops.make_graphs
        if setup.config.cache.sparse_attention_blocks is not None:
            ops.attention.sparse = BlockTopK(setup.config.cache.sparse_attention_blocks, setup.block_size)
            make_graphs = no_graphs  # what a token attends to is chosen in Python
        if self._aux is None:
            graphs = make_graphs(self._step_model, attention, step_tables)
        else:
            graphs = GraphsWithAux(make_graphs, self._step_model, attention, step_tables, self._aux)
        requests = RequestStates(max_num_seqs, max_model_len, vocab_size)
        logprobs_mode = setup.config.model.logprobs_mode
        acceptance = None
        if self._acceptance is not None:
            acceptance = DraftAcceptance(self._acceptance, requests, sampling, ops.sampling, logprobs_mode, ops.device)
        group = drafts = None
        if isinstance(step_tables, StepTables):
            group, drafts = self._join_group(step_tables, block_tables, attention, graphs, kv_caches.transfers)
        self._runner = ModelRunner(
            self._step_model,
            requests,
            block_tables,
            sampling,
            attention,
            ops.device,
            ops.sampling,
            graphs,
            logprobs_mode,
            kv_caches.transfers,
            acceptance,
            group,
            ops.clock,
        )
        by_layer = dict(zip(layer_names, kv_caches.by_layer, strict=True))
        num_tokens = min(setup.block_size, max_model_len, setup.limits.max_num_batched_tokens)
        has_head = ops.stage is None or ops.stage.is_first
        warm_up(self._step_model, attention, block_tables, num_tokens, ops.device, has_head=has_head)
        if setup.limits.num_drafts and group is None and not any(block_tables.has_state):
            capture_steps(graphs, ops.device)
        if self._drafter is not None:
            cache = DrafterCache(
                config=kv_cache_config, by_layer=by_layer, pools=kv_caches.pools, block_tables=block_tables,
                scratch_ids=scratch_ids[0],
            )  # fmt: skip
            choice: DraftChoice = LikeliestTokens(ops.sampling)
            if acceptance is not None and acceptance.drawn is not None:
                choice = DrawnTokens(ops.sampling, acceptance.drawn)
            of_ranks = drafts if ops.communicator.size > 1 else None
            self._runner.register_draft_model(self._drafter.start(cache, choice, of_ranks), setup.block_size)
        ops.all_ranks.barrier()  # every rank has its cache
        if not setup.rank and (ops.stage is None or self._sees_all_caches):
            self._connector_caches, self._blocks = caches_of_group(
                kv_caches, setup.seat, all_layers, self._layers_of_stages(), ops.attention, setup.kv_cache_dtype
            )

    def _join_group(
        self,
        tables: StepTables,
        block_tables: BlockTables,
        attention: AttentionGroups,
        graphs: StepGraphs,
        transfers: BlockTransfers | None,
    ) -> tuple[GroupLead, GroupDrafts]:
        """This rank's part of what several do: rank 0 leads, others follow."""
        ops, dtype = self._ops, self._setup.dtype
        late_rows = None if ops.stage is None else make_late_rows(ops.stage, self._setup, self._aux)
        step = GroupStep(self._step_model, graphs, attention, tables, ops.device, ops.stage, self._aux)
        group = GroupLead(
            ops.communicator, self._channel, self._model, step, block_tables, ops.abort, ops.all_ranks, late_rows
        )
        drafts = GroupDrafts(ops.communicator, group, tables, block_tables, dtype)
        config = self._setup.config.observability.profiler
        self._group_profile = profile = GroupProfile(ops.all_ranks, config, self._record, group)
        self._calls = calls = GroupCalls(ops.all_ranks, group, self)
        self._follower = GroupFollower(
            ops.communicator, ops.all_ranks, self._channel, self._model, step, attention, dtype, drafts, profile,
            calls, transfers, self._lock_step,
        )  # fmt: skip
        if self._lock_step is not None and not self._setup.rank:
            self._lock_step.tell = partial(group.send, JoinPass())
        return group, drafts

    def _scratch_ids(self, kv_cache_config: KVCacheConfig) -> np.ndarray:
        """[num_steps, num_scratch_blocks] blocks that no request has, for trees of drafts of the steps in flight."""
        setup, found = self._setup, self._setup.config.speculative
        tree = () if found is None else found.tree
        groups, num_blocks = kv_cache_config.groups, kv_cache_config.num_blocks
        if tree and (len(groups) > 1 or not isinstance(groups[0].spec, AttentionSpec)):
            raise ConfigError(
                "speculative_config: speculative_token_tree needs a model whose layers, those of a head included, have "
                "one kind of attention, and keys and values for it", hint="leave it out", field="speculative_config",
            )  # fmt: skip
        num_scratch = num_scratch_blocks(tree, setup.limits.max_num_seqs, setup.block_size)
        depth = setup.config.parallel.pipeline_parallel_size
        return np.arange(num_blocks - depth * num_scratch, num_blocks).reshape(depth, num_scratch)

    def kv_cache_identity(self) -> dict[str, Any]:
        """What decides which bytes a block of the cache, which must be allocated, has for given tokens."""
        assert self._blocks is not None and self._connector_caches is not None, "initialize_kv_cache comes before tiers"
        return cache_identity(self._setup, self._connector_caches.kv_cache_config, self._blocks)

    def register_kv_tier(self, tier: KVTierWorker) -> None:
        """Give a tier's half the cache, which must be allocated, and call it with every step.

        Raises:
            UnsupportedError: there are other ranks, whose caches this one does not see.
        """
        if not self._sees_all_caches:
            raise UnsupportedError(
                "rank 0 does not see the KV caches of the other ranks: it does with the executor mp, where a setting "
                "asks for a tier",
                hint="use kv_disk, kv_offloading_size or a connector with the executor mp, or one rank",
            )
        assert self._blocks is not None, "initialize_kv_cache comes before tiers"
        tier.register_kv_caches(self._blocks)
        self._ready_runner().register_kv_tier(tier)

    def register_block_store(self, store: BlockStore) -> None:
        """As `register_kv_tier`, for the tier that keeps blocks in a store of ours."""
        self.register_kv_tier(OffloadingWorker(store))

    def register_kv_connector(self, config: KVTransferConfig) -> KVCacheLayout:
        """Make the worker's half of a connector, as `register_kv_tier`; returns the layout of the cache.

        Raises:
            ConfigError: the connector refuses the settings or the layout.
        """
        assert self._connector_caches is not None, "initialize_kv_cache comes before connectors"
        caches = self._connector_caches
        layout = describe_layout(self._setup, caches, self.kv_cache_identity()["kernels"])
        kind = connector_class(config)
        if self._setup.num_ranks > 1 and kind.has_layer_hooks:
            raise UnsupportedError(
                f"{config.kv_connector} is called around every layer, which is not supported with several ranks",
                hint="use one rank (numa_ranks=off), or a connector that works on blocks", field="kv_transfer_config",
            )  # fmt: skip
        half = make_connector(kind, config, KVConnectorRole.WORKER, layout)
        self.register_kv_tier(ConnectorWorker(half, caches.by_layer))
        return layout

    def shutdown_kv_tier(self) -> None:
        """The engine ends: let the worker's half of a tier finish."""
        self._ready_runner().shutdown_kv_tier()

    def execute_model(self, scheduled: SchedulerOutput) -> ComputedStep:
        """Compute a step's tokens."""
        if self._lock_step is not None:
            with self._lock_step.together():
                return self._ready_runner().execute_model(scheduled)
        return self._ready_runner().execute_model(scheduled)

    def sample_tokens(self, computed: ComputedStep, grammar: GrammarBitmask | None = None) -> ModelRunnerOutput:
        """Choose the tokens of a step that was computed."""
        return self._ready_runner().sample_tokens(computed, grammar)

    def _ready_runner(self) -> ModelRunner | Profile[ModelRunner]:
        assert self._runner is not None, "initialize_kv_cache comes before the first step"
        return self._runner


def _num_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
