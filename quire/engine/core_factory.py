"""From a resolved configuration to an engine core: the model loaded, the KV cache planned, the control plane on it.

Called by `engine.factory` for an engine in one process, and by the process that holds an engine core. Owns no state.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.config import QuireConfig
from quire.config.profiler import ProfilerConfig
from quire.config.speculative import SpeculativeConfig
from quire.core.draft_trees import MOST_TREES, num_scratch_blocks
from quire.core.drafts import DraftController, DraftProposer
from quire.core.expert_group import ExpertGroup
from quire.core.kv_spec import KVCacheConfig, KVCacheSpec
from quire.core.step_clock import step_clock
from quire.engine.core import EngineCore, never, nothing
from quire.engine.grammar_gate import grammar_gate, make_grammars
from quire.engine.kv_event_publisher import start_kv_events
from quire.engine.named_plugins import check_plugins
from quire.engine.speculation_reports import SpeculationReports
from quire.engine.step_measurements import measure_steps
from quire.engine.step_meter import make_meter
from quire.engine.step_recovery import StepRecovery
from quire.engine.tier_factory import start_tier
from quire.errors import ConfigError, UnsupportedError
from quire.executor.base import Executor
from quire.executor.drafting import DraftingExecutor, ModelProposer
from quire.executor.registry import executor_class
from quire.kv_cache.planning import concurrency, describe_pools, longest_that_fits, min_num_blocks, plan_kv_cache
from quire.kv_cache.pool_sizes import PlannedRequests
from quire.logger import get_logger
from quire.platforms.interface import Platform
from quire.sample.logits_processor import ProcessorSource
from quire.scheduler.kv_tier import KVTier
from quire.scheduler.live_state import live_state
from quire.scheduler.setup import SchedulerSetup, make_scheduler
from quire.spec_decode.controller import SpeculationController
from quire.spec_decode.filtered import FilteredProposer
from quire.spec_decode.registry import describe, make_controller, make_proposer, stats_reader
from quire.utils.paths import why_no_directory
from quire.utils.phases import PhaseTimer

if TYPE_CHECKING:
    from quire.flight_recorder.writer import RecordWriter

logger = get_logger(__name__)


def build_core(
    config: QuireConfig,
    platform: Platform,
    timer: PhaseTimer,
    *,
    logits_processors: Sequence[ProcessorSource] = (),
    on_step: Callable[[int], None] | None = None,
    kv_tier: KVTier | None = None,
    engine_index: int = 0,
    make_executor: Callable[..., Executor] | None = None,
    experts: ExpertGroup | None = None,
) -> EngineCore:
    """An engine core with its model loaded and its KV cache allocated.

    Args:
        config: resolved.
        timer: gets the phases.
        on_step: called with the number of tokens of each step, before it runs.
        kv_tier: the scheduler's half of a tier behind the KV cache; the worker is given the other one by
            `EngineCore.call_worker("register_kv_tier", half)`. None = there is none.
        engine_index: its number among the engine cores of a server.
        make_executor: called with config, platform and processors; None = what the settings name.
        experts: its place among cores that share experts; None = it has all.

    Raises:
        QuireError: the model or the machine does not allow it.
    """
    check_plugins(config)
    _make_profile_directory(config.observability.profiler)
    with timer.phase("model"):
        make: Any = make_executor or executor_class(config.parallel.distributed_executor_backend)
        shared = {} if experts is None else {"experts": experts}  # executors of plugins are not given any
        executor: Executor = make(config, platform, logits_processors, **shared)
    clock = step_clock(config.parallel, is_cpu=platform.is_cpu)
    proposer, controller, reports, executor = _make_speculation(config.speculative, executor, clock)
    with timer.phase("KV cache"):
        recovery = StepRecovery()
        setup = dataclasses.replace(_plan_memory(config, executor), has_proposer=proposer is not None)
    if isinstance(controller, SpeculationController) and experts is None:
        with timer.phase("step costs"):
            _measure_steps(config, executor, setup, controller)
    grammars = make_grammars(config)
    if proposer is not None:
        proposer = FilteredProposer(proposer, grammars.followed)
    gates = (grammar_gate(grammars, recovery.gate),)
    num_blocks = setup.kv_cache.pool_sizes()[0].num_blocks
    if config.observability.flight_recorder is None:
        offload = None if kv_tier is not None else start_tier(config, executor, setup.kv_cache)
        tier = kv_tier if offload is None else offload.tier
        scheduler = make_scheduler(setup, gates=gates, proposer=proposer, tier=tier, controller=controller)
        kv_events = start_kv_events(
            config.observability.kv_events, setup.kv_cache, scheduler.watch_blocks, engine_index
        )
        return EngineCore(
            executor, scheduler, recovery, num_blocks, on_step, grammars=grammars, kv_events=kv_events,
            on_shutdown=nothing if offload is None else offload.close,
            has_transfers=never if tier is None else lambda: scheduler.has_transfers,
            give_up_transfers=nothing if tier is None else tier.release_blocks, speculation=reports,
            observe=partial(live_state, scheduler),
            service=getattr(scheduler, "service", None), tier_bytes=int if offload is None else offload.host_bytes,
            meter=make_meter(config, executor),
            max_steps_in_flight=setup.max_steps_in_flight,
        )  # fmt: skip
    if kv_tier is not None:
        raise UnsupportedError("a recording does not hold what a KV tier decides", hint="leave out --flight-recorder")
    from quire.flight_recorder.recorded_scheduler import RecordedScheduler  # late: few engines record

    recorded = RecordedScheduler(setup, _make_writer(config, setup), gates, proposer=proposer, controller=controller)
    kv_events = start_kv_events(config.observability.kv_events, setup.kv_cache, recorded.watch_blocks, engine_index)
    return EngineCore(
        executor, recorded, recovery, num_blocks, on_step, grammars=grammars, on_shutdown=recorded.close,
        kv_events=kv_events, speculation=reports, observe=recorded.live_state, meter=make_meter(config, executor),
        max_steps_in_flight=setup.max_steps_in_flight,
    )  # fmt: skip


def _make_profile_directory(profiler: ProfilerConfig | None) -> None:
    """Now, as a profile that cannot be written would be lost."""
    if profiler is None:
        return
    path = profiler.torch_profiler_dir
    why = why_no_directory(Path(path).expanduser())
    if why is not None:
        raise ConfigError(
            f"the directory for profiles {path!r} cannot be used: {why}",
            hint="name a directory that can be created and written", field="profile",
        )  # fmt: skip


def _make_speculation(
    speculative: SpeculativeConfig | None, executor: Executor, clock: Callable[[], float]
) -> tuple[DraftProposer | None, DraftController | None, SpeculationReports | None, Executor]:
    """The proposer of drafts, its controller and what tells of them, None where nothing is drafted; and the executor,
    asked for drafts.
    """
    if speculative is None or speculative.is_off:
        return None, None, None, executor
    logger.info("speculative decoding: %s", describe(speculative))
    of_model = None
    if speculative.model_method is not None:
        marks_rows = speculative.draws_drafts and len(speculative.method) > 1
        of_model = ModelProposer(
            speculative.model_method, speculative.num_tokens, marks_rows=marks_rows, most_trees=MOST_TREES
        )
        executor = DraftingExecutor(executor, of_model)
    proposer, controller = make_proposer(speculative, of_model), make_controller(speculative, clock)
    return proposer, controller, SpeculationReports(stats_reader(proposer, controller)), executor


def _measure_steps(
    config: QuireConfig, executor: Executor, setup: SchedulerSetup, controller: SpeculationController
) -> None:
    """What steps with drafts take here, before there are requests: the controller starts from it."""
    speculative = config.speculative
    if speculative is None or speculative.acceptance != "sampled" or setup.max_steps_in_flight > 1:
        return  # drafts must be of the model there; or several stages compute steps in turn
    if setup.scheduler.has_plugin:
        return
    want_drafts = executor.want_drafts if isinstance(executor, DraftingExecutor) else None
    controller.begin(measure_steps(executor, setup, speculative.num_tokens, want_drafts, controller.clock))


def _plan_memory(config: QuireConfig, executor: Executor) -> SchedulerSetup:
    """Divide the memory that is left; what the control plane is made from."""
    max_len = config.max_model_len
    specs, available_bytes = executor.kv_cache_specs(), executor.available_kv_cache_bytes()
    depth = _num_steps_in_flight(config)
    max_chunk = min(depth * (config.scheduler.max_num_batched_tokens or max_len), max_len)
    num_scratch = _num_scratch_blocks(config)
    cache = config.cache
    if num_scratch and cache.num_blocks is not None:
        cache = dataclasses.replace(cache, num_blocks=cache.num_blocks + num_scratch)
    if cache.swap_space:  # each rank has its part of every block
        cache = dataclasses.replace(cache, swap_space=cache.swap_space / config.parallel.tensor_parallel_size)
    if config.has_longest_length:
        max_len = _longest_length(config, specs, available_bytes, max_chunk, num_scratch)
        max_chunk = min(max_chunk, max_len)
    kv_cache_config = plan_kv_cache(
        specs, available_bytes, cache, max_len, max_chunk, config.scheduler.max_num_seqs or 1,
        config.num_draft_tokens,
    )  # fmt: skip
    executor.initialize_kv_cache(kv_cache_config)
    if num_scratch:
        kv_cache_config = _without_scratch(kv_cache_config, num_scratch, max_len)
    num_requests = concurrency(kv_cache_config, max_len, max_chunk)
    logger.info(
        "KV cache: %s, capacity %d tokens (%.1f requests of %d tokens)",
        describe_pools(kv_cache_config), round(num_requests * max_len), num_requests, max_len,
    )  # fmt: skip
    return SchedulerSetup(
        scheduler=config.scheduler, cache=config.cache, kv_cache=kv_cache_config, max_model_len=max_len,
        max_step_drafts=config.max_step_drafts, max_steps_in_flight=depth, waits_for_tokens=depth > 1,
    )  # fmt: skip


def _longest_length(
    config: QuireConfig, specs: dict[str, KVCacheSpec], available_bytes: int, max_chunk: int, num_scratch: int
) -> int:
    """`max_model_len`, or what of it fits, where it was estimated before the model was loaded."""
    max_len = config.max_model_len
    requests = PlannedRequests(max_len, max_chunk, config.scheduler.max_num_seqs or 1, config.num_draft_tokens)
    available_bytes -= num_scratch * sum(spec.page_size_bytes for spec in specs.values())
    longest = longest_that_fits(specs, available_bytes, config.cache, requests)
    if 0 < longest < max_len:
        text = "max_model_len=%d was estimated; requests end at %d tokens, for which the KV cache has room"
        logger.warning(text, max_len, longest)
    return longest or max_len


def _num_steps_in_flight(config: QuireConfig) -> int:
    """One for each pipeline stage; schedulers of plugins plan one step after the other."""
    return 1 if config.scheduler.has_plugin else config.parallel.pipeline_parallel_size


def _num_scratch_blocks(config: QuireConfig) -> int:
    """Blocks that the worker needs beside those of requests, for each step that may be in flight."""
    tree = () if config.speculative is None else config.speculative.tree
    num_blocks = num_scratch_blocks(tree, config.scheduler.max_num_seqs or 1, config.cache.block_size or 1)
    return config.parallel.pipeline_parallel_size * num_blocks


def _without_scratch(kv_cache: KVCacheConfig, num_scratch: int, max_model_len: int) -> KVCacheConfig:
    """What the scheduler has of the cache."""
    num_blocks = kv_cache.pool_sizes()[0].num_blocks - num_scratch
    if num_blocks < min_num_blocks(max_model_len, kv_cache.block_size):
        raise ConfigError(
            f"speculative_config: speculative_token_tree needs {num_scratch} blocks of the KV cache, too few are "
            "left for a request", hint="use a smaller tree, or none", field="speculative_config",
        )  # fmt: skip
    return kv_cache.with_num_blocks(num_blocks)


def _make_writer(config: QuireConfig, setup: SchedulerSetup) -> Callable[[Callable[[], float]], RecordWriter]:
    directory, max_bytes = config.observability.flight_recorder, config.observability.flight_recorder_max_bytes
    assert directory is not None, "asked only when there is a flight recorder"
    from quire.flight_recorder.writer import RecordWriter

    return lambda clock: RecordWriter(Path(directory), max_bytes, setup, clock)
