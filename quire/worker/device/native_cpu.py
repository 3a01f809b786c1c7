"""The native CPU kernels: layers, attention, sampling and recorded steps on one `NativeRuntime`, which is made here."""

from __future__ import annotations

import os
from functools import partial

import torch

from quire.attention.backends.native_cpu import NativeCpuBackend
from quire.attention.selector import select_backend
from quire.config.device import ParallelConfig
from quire.config.engine import QuireConfig
from quire.config.expert_placement import ExpertPlaces
from quire.config.model import ONLINE_QUANTIZATIONS
from quire.config.pipeline import divide_layers
from quire.core.step_clock import step_clock
from quire.distributed.communicator import Communicator, SingleCommunicator
from quire.distributed.expert_exchange import ExpertExchange
from quire.distributed.pipeline import PipelineStage
from quire.distributed.seat import Seat
from quire.distributed.shared_memory import SharedMemoryCommunicator
from quire.distributed.shared_pages import SharedPages
from quire.kernels.native.limits import measure_limits
from quire.kernels.native.runtime import DEFAULT_SPIN_US, NativeRuntime
from quire.kernels.native.sampling import MAX_VOCAB_SIZE
from quire.layers.exchanged_experts import ExchangedKernels
from quire.layers.kernels import LayerKernels
from quire.layers.native import NativeKernels
from quire.layers.quantization import with_quantization
from quire.layers.sharded import ShardedKernels
from quire.layers.sharding import Shards
from quire.logger import get_logger
from quire.models.loader import attention_params_of
from quire.models.packing_cache import PackingCache, default_cache_directory
from quire.sample.ops.native import NativeSamplingOps
from quire.sample.ops.torch_ops import TorchSamplingOps
from quire.worker.device.graphs import no_graphs
from quire.worker.device.memory import HostMemory
from quire.worker.device.ops import DeviceOps
from quire.worker.device.recorded_chains import RecordedChains
from quire.worker.device.recorded_steps import ARENA_BYTES, RecordedSteps
from quire.worker.setup import WorkerSetup

logger = get_logger(__name__)

# Under a quota a spinning thread takes time that computing threads then lack: it waits from kernel to kernel of a step,
# which are tens of microseconds apart, and not from step to step.
QUOTA_SPIN_US = 100


def native_cpu(setup: WorkerSetup) -> DeviceOps:
    """The operations; starts the kernels' threads.

    Raises:
        NativeLibraryError: the library cannot be loaded.
        ConfigError: the kernels cannot serve the model.
    """
    config, vocab_size = setup.config, setup.arch.vocab_size
    device = torch.device("cpu")
    runtime = make_runtime(setup)
    torch.set_num_threads(1)  # one pool of threads: two at once would fight for the cores
    quantization = config.model.quantization
    is_online = quantization in ONLINE_QUANTIZATIONS and setup.arch.quantization is None
    kernels = with_quantization(
        NativeKernels(runtime, setup.dtype, quantization if is_online else None), quantization, setup.dtype
    )
    communicator, stage = _communicator(setup, runtime), _stage(setup, runtime)
    experts = _experts(setup, runtime)
    kernels = _divided(config.parallel, kernels, communicator, experts)
    # Calls of steps with other replicas differ by the tokens of those.
    is_recording = not config.model.enforce_eager and config.model.model_impl != "transformers" and experts is None
    record = partial(RecordedSteps, runtime, vocab_size=vocab_size)
    return DeviceOps(
        device=device,
        layers=kernels,
        attention=select_backend(
            NativeCpuBackend.name, attention_params_of(setup.arch), setup.dtype, device, NativeCpuBackend(runtime)
        ),
        sampling=NativeSamplingOps(runtime) if vocab_size <= MAX_VOCAB_SIZE else TorchSamplingOps(),
        memory=_memory(setup),
        make_graphs=partial(record, agree=(communicator if stage is None else stage.communicator).all_agree)
        if is_recording
        else no_graphs,
        make_chains=partial(RecordedChains, runtime) if is_recording else None,
        make_draft_graphs=partial(record, agree=communicator.all_agree) if is_recording and stage is not None else None,
        graph_bytes=ARENA_BYTES if is_recording else 0,
        packing_cache=_packing_cache(config, runtime),
        communicator=communicator,
        experts=experts,
        stage=stage,
        runtime=runtime,
        measure_limits=partial(measure_limits, runtime, setup.dtype),
        clock=step_clock(config.parallel, is_cpu=True),
    )


def make_runtime(setup: WorkerSetup) -> NativeRuntime:
    """Tier, threads and their places."""
    platform, num_threads = setup.platform, setup.num_threads
    cpus = platform.compute_cpus(num_threads) if setup.seat is None else _cpus_of_rank(setup, setup.seat)
    spin_us = _spin_us(setup)
    runtime = NativeRuntime(setup.config.device.kernel_tier, num_threads, cpus, spin_us)
    place = f"on CPUs {', '.join(map(str, cpus))}" if cpus else "not pinned"
    logger.info("native kernels: tier %s, %d threads %s", runtime.tier, num_threads, place)
    return runtime


def _cpus_of_rank(setup: WorkerSetup, seat: Seat) -> tuple[int, ...]:
    """Where the threads of this rank compute; on a machine with several memory nodes, this thread stays on theirs."""
    usable = setup.platform.cpus
    if usable is None:
        return ()
    local = seat.local_ranks
    cpus = usable.rank_cpus(local.index(seat.rank), len(local), setup.num_threads)
    if cpus and usable.num_nodes > 1:
        os.sched_setaffinity(0, usable.cpus_of_nodes(cpus))
    return cpus


def _spin_us(setup: WorkerSetup) -> int:
    """How long a thread spins before it sleeps, waiting for a kernel or for another rank."""
    cpus = setup.platform.cpus
    has_quota = cpus is not None and cpus.quota is not None
    num_replicas = 1 if setup.experts is None else setup.experts.num_replicas
    num_threads = num_replicas * setup.num_local_ranks * setup.num_threads
    is_crowded = num_replicas * setup.num_ranks > 1 and num_threads > setup.platform.num_cpus
    return QUOTA_SPIN_US if has_quota or is_crowded else DEFAULT_SPIN_US


def _communicator(setup: WorkerSetup, runtime: NativeRuntime) -> Communicator:
    """To the other ranks that have the same layers, where there are some."""
    seat = setup.seat
    if seat is None or seat.stage_size == 1:
        return SingleCommunicator()
    first_rank, is_only = seat.stage * seat.stage_size, seat.num_stages == 1
    return SharedMemoryCommunicator(
        runtime, seat.fd if seat.stage_fd is None else seat.stage_fd, seat.rank - first_rank, seat.stage_size,
        capacity=seat.capacity, spin_us=_spin_us(setup), timeout_s=seat.timeout_s, first_rank=first_rank,
        plan=seat.plan if is_only else None, sockets=seat.sockets if is_only else None,
    )  # fmt: skip


def _experts(setup: WorkerSetup, runtime: NativeRuntime) -> ExpertExchange | None:
    """To the replicas that share experts with this one, where some do."""
    if setup.experts is None:
        return None
    exchange = ExpertExchange(runtime, setup.experts, setup.rank, setup.num_ranks, spin_us=_spin_us(setup))
    most = max(layer.moe.num_chosen for layer in setup.arch.layers if layer.moe is not None)
    exchange.check_room(most * setup.limits.max_num_batched_tokens, setup.arch.hidden_size * setup.dtype.itemsize)
    return exchange


def _divided(
    parallel: ParallelConfig, kernels: LayerKernels, communicator: Communicator, experts: ExpertExchange | None
) -> LayerKernels:
    """The kernels of this rank: what it has of a model's matrices."""
    num_replicas = 1 if experts is None else experts.size // communicator.size
    places = None
    if parallel.enable_expert_parallel:
        places = ExpertPlaces(parallel.expert_placement_strategy, communicator.size * num_replicas)
    own = kernels
    if communicator.size > 1:
        own = ShardedKernels(kernels, Shards(communicator), places if experts is None else None)
    if experts is None:
        return own
    assert places is not None, "replicas share experts where whole ones are placed"
    return ExchangedKernels(own, kernels, experts, places)


def _stage(setup: WorkerSetup, runtime: NativeRuntime) -> PipelineStage | None:
    """This rank's layers, and the communicator between all ranks; None = every rank has all layers."""
    seat = setup.seat
    if seat is None or seat.num_stages == 1:
        return None
    layers = divide_layers(setup.arch, seat.num_stages, setup.config.parallel.pipeline_layer_partition)[seat.stage]
    communicator = SharedMemoryCommunicator(
        runtime, seat.fd, seat.rank, seat.size, capacity=seat.capacity, spin_us=_spin_us(setup),
        timeout_s=seat.timeout_s, plan=seat.plan, sockets=seat.sockets,
    )  # fmt: skip
    return PipelineStage(communicator=communicator, number=seat.stage, num_stages=seat.num_stages, layers=layers)


def _memory(setup: WorkerSetup) -> HostMemory:
    seat, pages = setup.seat, None
    if seat is not None and seat.cache_fds:
        pages = SharedPages(seat.cache_fds[seat.rank], is_owner=True)
    return HostMemory(setup.platform.memory.available_bytes, pages)


def _packing_cache(config: QuireConfig, runtime: NativeRuntime) -> PackingCache | None:
    """None when packed weights are not kept, or the errors of packing are asked for."""
    directory = default_cache_directory()
    if directory is None or not config.load.packing_cache or config.model.quantization_report:
        return None
    return PackingCache(directory, runtime)
