"""Worker: one device, the model on it, its memory, and the runner of its steps.

Made and called by an executor. Owns the model and the KV cache for the life of the process.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quire.attention.selector import select_backend
from quire.config.engine import QuireConfig
from quire.config.hf_config import ModelArch
from quire.core.computed_step import ComputedStep
from quire.core.grammar_bitmask import GrammarBitmask
from quire.core.kv_spec import KVCacheConfig, KVCacheSpec
from quire.core.runner_output import ModelRunnerOutput
from quire.core.scheduler_output import SchedulerOutput
from quire.distributed.parallel_context import ParallelContext
from quire.logger import get_logger
from quire.models.loader import attention_params, load_model
from quire.platforms.interface import Platform
from quire.sample.logits_processor import ProcessorKind
from quire.sample.states import SamplingStates
from quire.utils.memory import GIB, read_memory
from quire.worker.allocator import keep_freed_memory
from quire.worker.attention_groups import AttentionGroups
from quire.worker.block_tables import BlockTables
from quire.worker.kv_cache_tensors import stored_spec
from quire.worker.memory import (
    StepLimits,
    check_allocation,
    check_swap_space,
    estimate_weights_bytes,
    estimate_workspace_bytes,
    plan_memory,
)
from quire.worker.model_runner import ModelRunner
from quire.worker.native import make_kernels, make_packing_cache, make_runtime, make_sampling_ops
from quire.worker.page_transfers import allocate_with_swap_space
from quire.worker.request_states import RequestStates
from quire.worker.step_graph import ARENA_BYTES, StepGraphs
from quire.worker.warmup import warm_up

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
KV_CACHE_DTYPES = {**DTYPES, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}

logger = get_logger(__name__)


class Worker:
    """Loads the model; runs its steps once it was given a KV cache.

    Args:
        config: resolved: nothing in it is "auto" or missing.
        platform: the machine, with the config's device.
        custom_processors: logits processors of the engine's owner.

    Raises:
        ModelError: the model directory or its weights are unusable.
        NotEnoughMemoryError: weights and workspace do not fit.
    """

    def __init__(
        self, config: QuireConfig, platform: Platform, custom_processors: Sequence[type[ProcessorKind]] = ()
    ) -> None:
        self._config = config
        self._arch, self._limits, self._block_size = _resolved(config)
        self._dtype = DTYPES[config.model.dtype]
        self._kv_cache_dtype = KV_CACHE_DTYPES[config.cache.kv_cache_dtype]
        self._device = torch.device(platform.device)
        self._platform = platform
        self._custom_processors = tuple(custom_processors)
        keep_freed_memory()
        num_threads = config.device.num_threads or platform.num_cpus
        self._runtime = make_runtime(config, num_threads, platform)
        # One pool of threads: two at once would fight for the cores.
        torch.set_num_threads(num_threads if self._runtime is None else 1)
        self._workspace_bytes = estimate_workspace_bytes(self._arch, self._limits, self._dtype.itemsize)
        self._records_steps = self._runtime is not None and not config.model.enforce_eager
        if self._records_steps:
            self._workspace_bytes += ARENA_BYTES
        self._free_bytes = self._read_free_bytes()
        self._check_weights_fit()
        params = attention_params(self._arch)
        self._backend = select_backend(
            config.device.attention_backend, params, self._dtype, self._device, self._runtime
        )
        self._model = load_model(
            self._arch,
            config.model_path,
            config.load,
            self._dtype,
            self._device,
            ParallelContext(),
            self._backend,
            self._limits.max_model_len,
            config.model.seed,
            make_kernels(config, self._runtime, self._dtype),
            packing_cache=make_packing_cache(config, self._runtime),
            reports_error=config.model.quantization_report,
        )
        self._runner: ModelRunner | None = None

    @property
    def model(self) -> torch.nn.Module:
        """The loaded model."""
        return self._model

    def kv_cache_specs(self) -> dict[str, KVCacheSpec]:
        """Layer name -> what it needs from the KV cache, in layer order.

        Raises:
            UnsupportedError: a layer is of a kind that this worker cannot store.
        """
        specs = self._model.kv_cache_specs(self._block_size)
        dtype_bytes = self._kv_cache_dtype.itemsize
        return {name: stored_spec(name, spec, dtype_bytes) for name, spec in specs.items()}

    def available_kv_cache_bytes(self) -> int:
        """Bytes the KV cache may take; logs how they were found.

        On a CPU no more than `max_num_seqs` requests of `max_model_len` tokens could fill: memory that the engine
        does not need belongs to others.
        """
        budget = plan_memory(
            free_bytes=self._free_bytes,
            utilization=self._config.cache.memory_utilization,
            weights_bytes=self._weights_bytes(),
            workspace_bytes=self._workspace_bytes,
            useful_bytes=self._useful_bytes() if self._device.type == "cpu" else None,
            swap_bytes=self._swap_bytes_here(),
        )
        logger.info(budget.describe())
        return budget.kv_cache_bytes

    def initialize_kv_cache(self, kv_cache_config: KVCacheConfig) -> None:
        """Allocate the cache and the swap space, make the rows, warm up.

        Raises:
            NotEnoughMemoryError: the cache is larger than what is free.
        """
        needed_bytes = kv_cache_config.num_blocks * kv_cache_config.page_size_bytes
        check_allocation(needed_bytes, self._read_free_bytes(), self._workspace_bytes, self._swap_bytes_here())
        max_num_seqs, max_model_len = self._limits.max_num_seqs, self._limits.max_model_len
        layer_names = list(self.kv_cache_specs())
        kv_caches, transfers = allocate_with_swap_space(
            kv_cache_config, layer_names, self._backend, self._kv_cache_dtype, self._device
        )
        attention = AttentionGroups(kv_cache_config, layer_names, kv_caches, self._backend)
        block_tables = BlockTables(kv_cache_config, max_num_seqs, max_model_len)
        sampling_ops = make_sampling_ops(self._runtime, self._arch.vocab_size)
        self._runner = ModelRunner(
            self._model,
            RequestStates(max_num_seqs, max_model_len, self._arch.vocab_size),
            block_tables,
            SamplingStates(
                max_num_seqs,
                self._arch.vocab_size,
                self._device,
                self._custom_processors,
                sampling_ops.apply_penalties_inplace,
            ),
            attention,
            self._device,
            sampling_ops,
            self._config.model.logprobs_mode,
            self._make_step_graphs(attention, block_tables),
            transfers,
        )
        num_tokens = min(self._block_size, max_model_len, self._limits.max_num_batched_tokens)
        warm_up(self._model, attention, block_tables, num_tokens, self._device)

    def _make_step_graphs(self, attention: AttentionGroups, block_tables: BlockTables) -> StepGraphs | None:
        if self._runtime is None or not self._records_steps:
            return None
        return StepGraphs(self._runtime, self._model, attention, block_tables, self._arch.vocab_size)

    def execute_model(self, scheduled: SchedulerOutput) -> ComputedStep:
        """Compute a step's tokens."""
        return self._ready_runner().execute_model(scheduled)

    def sample_tokens(self, computed: ComputedStep, grammar: GrammarBitmask | None = None) -> ModelRunnerOutput:
        """Choose the tokens of a step that was computed."""
        return self._ready_runner().sample_tokens(computed, grammar)

    def _ready_runner(self) -> ModelRunner:
        assert self._runner is not None, "initialize_kv_cache comes before the first step"
        return self._runner

    def _check_weights_fit(self) -> None:
        """Refuse a model that is too large before its weights fill the memory."""
        plan_memory(
            free_bytes=self._free_bytes,
            utilization=self._config.cache.memory_utilization,
            weights_bytes=estimate_weights_bytes(
                self._arch, self._limits.max_model_len, self._dtype.itemsize, self._config.model.quantization
            ),
            workspace_bytes=self._workspace_bytes,
            useful_bytes=None,
            swap_bytes=self._swap_bytes_here(),
        )
        if self._device.type != "cpu":
            check_swap_space(self._swap_bytes, read_memory().available_bytes)

    @property
    def _swap_bytes(self) -> int:
        return int(self._config.cache.swap_space * GIB)

    def _swap_bytes_here(self) -> int:
        """Bytes of the swap space that come out of the device's memory."""
        return self._swap_bytes if self._device.type == "cpu" else 0

    def _weights_bytes(self) -> int:
        tensors = self._model.stored_tensors().values()
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def _useful_bytes(self) -> int:
        """Pages for every row at its longest, and the null page."""
        blocks_per_req = -(-self._limits.max_model_len // self._block_size)
        page_bytes = sum(spec.page_size_bytes for spec in self.kv_cache_specs().values())
        return (self._limits.max_num_seqs * blocks_per_req + 1) * page_bytes

    def _read_free_bytes(self) -> int:
        """What the device can still give, looked at now; never more than the platform said."""
        if self._device.type == "cpu":
            return min(self._platform.memory.available_bytes, read_memory().available_bytes)
        free_bytes, _ = torch.cuda.mem_get_info(self._device)
        return free_bytes


def _resolved(config: QuireConfig) -> tuple[ModelArch, StepLimits, int]:
    """The model's shape, the largest step and the page size of a config that went through `resolve`."""
    hint = "is missing: the config did not go through config.resolve"
    assert config.arch is not None, f"arch {hint}"
    assert config.model.max_model_len is not None, f"max_model_len {hint}"
    assert config.model.dtype in DTYPES, f"dtype={config.model.dtype!r} is not one of {', '.join(DTYPES)}"
    assert config.scheduler.max_num_seqs is not None, f"max_num_seqs {hint}"
    assert config.scheduler.max_num_batched_tokens is not None, f"max_num_batched_tokens {hint}"
    assert config.cache.block_size is not None, f"block_size {hint}"
    limits = StepLimits(
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        max_model_len=config.model.max_model_len,
    )
    return config.arch, limits, config.cache.block_size
