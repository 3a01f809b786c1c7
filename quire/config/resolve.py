"""How every `auto` becomes a value: a list of named pure rules, each of which says why.

Called once by the entry points, with the machine and the model's shape; the caller logs the decisions.
A rule never overrides what the user gave. Checks that need the whole configuration are in `config.cross_checks`.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from quire.config.cross_checks import check_against_model, check_batch, check_device, check_supported
from quire.config.engine import QuireConfig
from quire.config.model import LONGEST, STORED_QUANTIZATIONS
from quire.config.model_arch import ModelArch
from quire.config.parallel_checks import check_parallel, size_settings
from quire.errors import ConfigError, UnsupportedError
from quire.platforms.interface import Platform

GIB = 1 << 30
DTYPE_NAMES = {"half": "float16", "float": "float32", "fp8": "fp8_e4m3"}
NATIVE_BLOCK_UNIT = 16  # tokens
NATIVE_MAX_HEAD_SIZE = 512
SERVER_DECODE_SLOWDOWN = 2.0
# A step reads them; with fewer, what a second node's bandwidth saves is less than four exchanges a layer take.
MIN_WEIGHTS_OF_TWO_RANKS = 500_000_000
# Few drafts in a step: one of a few requests has room for long ones, of many requests few gain, and logits take memory.
# And none from past answers: how long a request takes does not depend on what others have written.
SPECULATION = '{"method":"suffix","max_step_draft_tokens":32,"suffix_decoding_max_cached_requests":0}'
KEEP_DTYPE = ("float16", "bfloat16", "float32")


class UsageContext(Enum):
    """Who runs the engine; a server trades batch size for shorter steps."""

    LLM_CLASS = "offline generation"
    API_SERVER = "server"


@dataclass(frozen=True, slots=True)
class Decision:
    """What a rule chose: `name` is the user-facing name of the setting."""

    name: str
    value: Any
    reason: str

    def __str__(self) -> str:
        return f"{self.name}={self.value} ({self.reason})"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolveContext:
    """What the rules may look at besides the configuration.

    Attributes:
        platform: the machine.
        usage: who runs the engine.
        block_sizes: attention backend -> tokens per block it prefers.
        kernel_tiers: tier of the native kernels -> why it does not run here, None = it does; best first. Empty
            where they are not built.
    """

    platform: Platform
    usage: UsageContext = UsageContext.LLM_CLASS
    block_sizes: Mapping[str, int] = field(default_factory=lambda: {"torch_reference": 16})
    kernel_tiers: Mapping[str, str | None] = field(default_factory=dict)


Rule = Callable[[QuireConfig, ResolveContext], tuple[QuireConfig, "Decision | None"]]


def resolve(
    config: QuireConfig,
    platform: Platform,
    arch: ModelArch,
    *,
    usage: UsageContext = UsageContext.LLM_CLASS,
    block_sizes: Mapping[str, int] | None = None,
    kernel_tiers: Mapping[str, str | None] | None = None,
) -> tuple[QuireConfig, list[Decision]]:
    """`config` with every auto replaced, and what was chosen.

    Args:
        config: as the user gave it.
        platform: the machine, with the device chosen (`detect_platform(config.device.device)`).
        arch: the model's shape.
        usage: who runs the engine.
        block_sizes: attention backend -> tokens per block it prefers; default: 16 for each.
        kernel_tiers: tier of the native kernels -> why it does not run here, None = it does; best first.

    Raises:
        ConfigError: settings contradict each other, the model or the machine.
        UnsupportedError: a known setting that is not honoured yet.
    """
    context = ResolveContext(platform=platform, usage=usage, kernel_tiers=kernel_tiers or {})
    if block_sizes is not None:
        context = dataclasses.replace(context, block_sizes=block_sizes)
    config = dataclasses.replace(config, arch=arch)
    check_supported(config)
    check_device(config, platform)
    decisions = []
    for rule in RULES:
        config, decision = rule(config, context)
        if decision is not None:
            decisions.append(decision)
    check_against_model(config)
    check_batch(config)
    check_parallel(config)
    return config, decisions


def resolve_device(config: QuireConfig, context: ResolveContext) -> tuple[QuireConfig, Decision | None]:
    """CUDA when the machine has it, else the CPU."""
    if config.device.device != "auto":
        return config, None
    return _choose(config, "device", "device", context.platform.device, context.platform.describe())


def resolve_tensor_parallel_size(config: QuireConfig, context: ResolveContext) -> tuple[QuireConfig, Decision | None]:
    """Two ranks on two memory nodes: each reads its weights and cache from its own memory (ADR 0101).

    Only where nothing was said of processes, threads or nodes, and several ranks can compute the model.
    """
    parallel, cpus = config.parallel, context.platform.cpus
    num_nodes = 1 if cpus is None or cpus.quota is not None else cpus.num_nodes
    is_open = parallel.numa_ranks == parallel.distributed_executor_backend == "auto"
    is_open = is_open and config.device.num_threads is None and context.platform.is_cpu
    sizes = (parallel.tensor_parallel_size, parallel.data_parallel_size, parallel.pipeline_parallel_size)
    if cpus is None or num_nodes != 2 or not is_open or max(sizes) > 1:
        return config, None
    two = _replace(config, "parallel", tensor_parallel_size=2)
    num_weights = _arch(config).num_layer_weights
    if num_weights < MIN_WEIGHTS_OF_TWO_RANKS:
        reason = f"two memory nodes, but {num_weights / 1e6:.0f} million weights gain less than exchanges cost"
        return config, Decision("tensor_parallel_size", 1, reason)
    try:
        check_parallel(two)
    except UnsupportedError as error:
        return config, Decision("tensor_parallel_size", 1, f"two memory nodes, but {error.message}")
    num_threads = max(1, context.platform.num_cpus // 2)
    if min(Counter(core.node for core in cpus.cores).values()) < num_threads:
        reason = "two memory nodes, but of different sizes: their cores cannot be divided evenly"
        return config, Decision("tensor_parallel_size", 1, reason)
    return two, Decision("tensor_parallel_size", 2, "two memory nodes: a rank on each, next to its weights and cache")


def resolve_num_threads(config: QuireConfig, context: ResolveContext) -> tuple[QuireConfig, Decision | None]:
    """As many compute threads as usable cores, divided among the replicas and their ranks."""
    if config.device.num_threads is not None:
        return config, None
    platform, parallel = context.platform, config.parallel
    num_cpus, count, num_ranks = platform.num_cpus, parallel.data_parallel_size, parallel.num_ranks
    reason = "usable cores" if count * num_ranks == 1 else f"{num_cpus} usable cores"
    if count > 1:
        reason += f" shared by {count} replicas"
        if platform.cpus is not None and platform.cpus.num_nodes > 1:
            reason += f", each on one of {platform.cpus.num_nodes} memory nodes"
    if num_ranks > 1:
        reason += f", divided by {num_ranks} ranks"
    return _choose(config, "device", "num_threads", max(1, num_cpus // (count * num_ranks)), reason)


def resolve_attention_backend(config: QuireConfig, context: ResolveContext) -> tuple[QuireConfig, Decision | None]:
    """The native kernels where they can be used.

    A block size that they lack is refused, not served by other attention, whose results may depend on the batch.
    """
    problem = _native_problem(config, context)
    bad_size = _block_size_problem(config)
    if config.device.attention_backend == "native_cpu" and (problem or bad_size):
        raise ConfigError(
            f"attention_backend='native_cpu' cannot be used: {problem or bad_size}",
            hint="change that, or use attention_backend='auto'",
            field="attention_backend",
        )
    if config.device.attention_backend == "auto" and problem is None and bad_size is not None:
        raise ConfigError(
            bad_size,
            hint="leave block_size out, or name attention_backend='torch_reference', with which a result may depend "
            "on what else is in the batch",
            field="block_size",
        )
    if config.device.attention_backend != "auto":
        return config, None
    if problem is None:
        return _choose(config, "device", "attention_backend", "native_cpu", "the CPU's own kernels")
    return _choose(config, "device", "attention_backend", "torch_reference", problem)


def resolve_kernel_tier(config: QuireConfig, context: ResolveContext) -> tuple[QuireConfig, Decision | None]:
    """The best tier that runs here; one that was asked for and does not run is refused."""
    asked, tiers = config.device.kernel_tier, context.kernel_tiers
    running = [name for name, problem in tiers.items() if problem is None]
    if not running or config.device.attention_backend != "native_cpu":
        return config, None
    if asked != "auto":
        if asked not in running:
            raise ConfigError(
                f"kernel_tier={asked!r} does not run on this machine: {tiers.get(asked, 'not in this build')}",
                hint=f"use 'auto', or one of {', '.join(running)}",
                field="kernel_tier",
            )
        return config, None
    refused = [f"{name}: {problem}" for name, problem in tiers.items() if problem is not None]
    reason = "; ".join([f"the best of the native kernels that run here ({', '.join(running)})", *refused])
    return _choose(config, "device", "kernel_tier", running[0], reason)


def resolve_executor(config: QuireConfig, context: ResolveContext) -> tuple[QuireConfig, Decision | None]:
    """One process while nothing is divided.

    Raises:
        ConfigError: one process is asked for, and several ranks.
    """
    asked, num_ranks = config.parallel.distributed_executor_backend, config.parallel.num_ranks
    if asked == "uni" and num_ranks > 1:
        raise ConfigError(
            f"distributed_executor_backend='uni' is one process, {size_settings(config)} needs {num_ranks}",
            hint="use distributed_executor_backend='mp', or leave it out", field="distributed_executor_backend",
        )  # fmt: skip
    if asked != "auto":
        return config, None
    if num_ranks > 1:
        return _choose(config, "parallel", "distributed_executor_backend", "mp", f"{num_ranks} ranks on this machine")
    return _choose(config, "parallel", "distributed_executor_backend", "uni", "the model runs in one process")


def resolve_names(config: QuireConfig, context: ResolveContext) -> tuple[QuireConfig, Decision | None]:
    """The model is served under the name it was given by."""
    if config.model.served_model_names:
        return config, None
    named = _replace(config, "model", served_model_names=(config.model.model,))
    return named, Decision("served_model_name", config.model.model, "the model as given")


def resolve_load_format(config: QuireConfig, context: ResolveContext) -> tuple[QuireConfig, Decision | None]:
    """What the model consists of: formats that cannot run code.

    Raises:
        ConfigError: the other one is asked for.
    """
    found = "gguf" if _arch(config).gguf_architecture else "safetensors"
    asked = config.load.load_format
    if asked in ("gguf", "safetensors") and asked != found:
        raise ConfigError(
            f"load_format={asked!r}, but the model's weights are in {found}",
            hint="leave out load_format, or name the file", field="load_format",
        )  # fmt: skip
    if asked != "auto":
        return config, None
    return _choose(config, "load", "load_format", found, "what the model's weights are in; it cannot run code")


def resolve_stored_quantization(config: QuireConfig, context: ResolveContext) -> tuple[QuireConfig, Decision | None]:
    """A quantization that the checkpoint has is not done again.

    Raises:
        ConfigError: the checkpoint is of another kind.
    """
    name = config.model.quantization
    if name not in STORED_QUANTIZATIONS:
        return config, None
    if not _arch(config).gguf_architecture:
        raise ConfigError(
            f"quantization={name!r}, but the model is not a GGUF file",
            hint="leave out quantization, or give a .gguf file as the model", field="quantization",
        )  # fmt: skip
    return _replace(config, "model", quantization=None), Decision("quantization", "none", "weights stay as stored")


def resolve_model_impl(config: QuireConfig, context: ResolveContext) -> tuple[QuireConfig, Decision | None]:
    """Quire's own code, unless only transformers has the class, or the user asked for that."""
    asked, name = config.model.model_impl, _arch(config).architecture
    if asked == "vllm":
        return _replace(config, "model", model_impl="quire"), None
    if asked != "auto":
        return config, None
    if _arch(config).config_json:
        return _choose(config, "model", "model_impl", "transformers", f"Quire has no family for {name}")
    return _choose(config, "model", "model_impl", "quire", f"Quire has the family of {name}")


def resolve_dtype(config: QuireConfig, context: ResolveContext) -> tuple[QuireConfig, Decision | None]:
    """The checkpoint's type where the device computes it natively, else one that loses no digits."""
    if config.model.dtype != "auto":
        name = DTYPE_NAMES.get(config.model.dtype, config.model.dtype)
        return _replace(config, "model", dtype=name), None
    is_native = _native_problem(config, context) is None and config.device.attention_backend != "torch_reference"
    return _choose(config, "model", "dtype", *_dtype_for(_arch(config).torch_dtype, context.platform, is_native))


def resolve_kv_cache_dtype(config: QuireConfig, context: ResolveContext) -> tuple[QuireConfig, Decision | None]:
    """Keys and values are kept in the model's type."""
    given = config.cache.kv_cache_dtype
    if given != "auto":
        return _replace(config, "cache", kv_cache_dtype=DTYPE_NAMES.get(given, given)), None
    return _choose(config, "cache", "kv_cache_dtype", config.model.dtype, "the model's dtype")


def resolve_block_size(config: QuireConfig, context: ResolveContext) -> tuple[QuireConfig, Decision | None]:
    """What the attention backend prefers."""
    if config.cache.block_size is not None:
        return config, None
    backend = config.device.attention_backend
    return _choose(config, "cache", "block_size", context.block_sizes.get(backend, 16), f"preferred by {backend}")


def resolve_max_model_len(config: QuireConfig, context: ResolveContext) -> tuple[QuireConfig, Decision | None]:
    """The longest sequence the model was made for; of -1 the largest length whose memory is to be looked at.

    What of it fits is found in `engine.memory_estimate`, as it needs the model's files.
    """
    asked, scheduler = config.model.max_model_len, config.scheduler
    if asked is not None and asked != LONGEST:
        return config, None
    limit = _arch(config).max_position_embeddings
    most = None if scheduler.enable_chunked_prefill else scheduler.max_num_batched_tokens
    if asked == LONGEST and most is not None and most < limit:
        return _choose(config, "model", "max_model_len", most, "max_num_batched_tokens, as chunked prefill is off")
    reason, original = "max_position_embeddings of the model", _longrope_length(_arch(config))
    if original is not None and limit > original:
        reason += f", which is above {original}: every prompt has longrope's long factors"
    return _choose(config, "model", "max_model_len", limit, reason)


def resolve_max_num_seqs(config: QuireConfig, context: ResolveContext) -> tuple[QuireConfig, Decision | None]:
    """By device and usage, but never above a token budget that the user gave."""
    if config.scheduler.max_num_seqs is not None:
        return config, None
    _, value, device = _batch_defaults(context)
    reason = f"{context.usage.value} on {device}"
    budget = config.scheduler.max_num_batched_tokens
    if budget is not None and budget < value:
        value, reason = budget, f"not above max_num_batched_tokens={budget}"
    return _choose(config, "scheduler", "max_num_seqs", value, reason)


def resolve_num_state_checkpoints(config: QuireConfig, context: ResolveContext) -> tuple[QuireConfig, Decision | None]:
    """As many as there may be requests at once, where there are states to be kept."""
    if config.cache.num_state_checkpoints is not None or not _arch(config).has_states:
        return config, None
    if not config.cache.enable_prefix_caching:
        return _choose(config, "cache", "num_state_checkpoints", 0, "prefix caching is off")
    return _choose(config, "cache", "num_state_checkpoints", config.scheduler.max_num_seqs, "max_num_seqs")


def resolve_max_num_batched_tokens(config: QuireConfig, context: ResolveContext) -> tuple[QuireConfig, Decision | None]:
    """By device and usage, within what max_num_seqs full requests could fill."""
    scheduler, max_model_len = config.scheduler, config.model.max_model_len or 1
    if scheduler.max_num_batched_tokens is not None:
        return config, None
    max_num_seqs = scheduler.max_num_seqs or 1
    value, _, device = _batch_defaults(context)
    reason = f"{context.usage.value} on {device}"
    if value > max_num_seqs * max_model_len:
        value, reason = max_num_seqs * max_model_len, "max_num_seqs requests of max_model_len tokens"
    if value < max_num_seqs:
        value, reason = max_num_seqs, "one token for each of max_num_seqs requests"
    if not scheduler.enable_chunked_prefill and value < max_model_len:
        value, reason = max_model_len, "chunked prefill is off: a step must hold the longest prompt"
    return _choose(config, "scheduler", "max_num_batched_tokens", value, reason)


def resolve_max_decode_slowdown(config: QuireConfig, context: ResolveContext) -> tuple[QuireConfig, Decision | None]:
    """Readers of a server's answers must not wait for others' prompts; offline, no client reads along."""
    if config.scheduler.max_decode_slowdown is not None:
        return config, None
    if not config.scheduler.enable_chunked_prefill:
        return _choose(config, "scheduler", "max_decode_slowdown", 0.0, "chunked prefill is off: prompts are not split")
    value = SERVER_DECODE_SLOWDOWN if context.usage is UsageContext.API_SERVER else 0.0
    return _choose(config, "scheduler", "max_decode_slowdown", value, context.usage.value)


def resolve_speculation(config: QuireConfig, context: ResolveContext) -> tuple[QuireConfig, Decision | None]:
    """Drafts from a request's own text, where nothing was said of drafts and the bars of ADR 0080 were measured.

    So not with other kernels (those of models that transformers computes among them), several processes for a step,
    plugins that schedule, connectors, or attention to some blocks; nor where each draft takes memory for a state of
    recurrent layers.
    """
    parallel = config.parallel
    is_measured = (
        config.device.attention_backend == "native_cpu"
        and config.model.model_impl == "quire"
        and parallel.distributed_executor_backend == "uni"
        and not (parallel.data_parallel_size > 1 and parallel.enable_expert_parallel)
        and not config.scheduler.has_plugin
        and config.kv_transfer is None
        and config.cache.sparse_attention_blocks is None
        and not _arch(config).has_states
    )
    if config.speculative is not None or not is_measured:
        return config, None
    return _choose(config, "speculation", "speculative_config", SPECULATION, "what repeats is guessed; the same bytes")


RULES: tuple[Rule, ...] = (
    resolve_device,
    resolve_names,
    resolve_load_format,
    resolve_stored_quantization,
    resolve_model_impl,
    resolve_dtype,
    resolve_attention_backend,
    resolve_tensor_parallel_size,
    resolve_num_threads,
    resolve_executor,
    resolve_kernel_tier,
    resolve_kv_cache_dtype,
    resolve_block_size,
    resolve_max_model_len,
    resolve_max_num_seqs,
    resolve_num_state_checkpoints,
    resolve_max_num_batched_tokens,
    resolve_max_decode_slowdown,
    resolve_speculation,
)


def _replace(config: QuireConfig, section: str, **values: Any) -> QuireConfig:
    return dataclasses.replace(config, **{section: dataclasses.replace(getattr(config, section), **values)})


def _choose(config: QuireConfig, section: str, name: str, value: Any, reason: str) -> tuple[QuireConfig, Decision]:
    return _replace(config, section, **{name: value}), Decision(name, value, reason)


def _arch(config: QuireConfig) -> ModelArch:
    assert config.arch is not None, "resolve() sets the architecture before the rules run"
    return config.arch


def _longrope_length(arch: ModelArch) -> int | None:
    """The longest sequence for which the model's longrope, if it has one, has its short factors."""
    for layer in arch.layers:
        mixer = layer.attention or layer.latent_attention
        if mixer is not None and mixer.rope is not None and mixer.rope.rope_type == "longrope":
            return int(dict(mixer.rope.parameters)["original_max_position_embeddings"])
    return None


def _native_problem(config: QuireConfig, context: ResolveContext) -> str | None:
    """Why the native CPU kernels cannot serve this model; None = they can. `dtype` may still be "auto"."""
    if not context.platform.is_cpu:
        return f"they run on a CPU, and the device is {context.platform.device}"
    if None not in context.kernel_tiers.values():
        return "the native kernels are not built (quire collect-env says why)"
    if config.model.dtype == "float16":
        return "the native kernels compute in bfloat16 and float32"
    for head_size in sorted({attention.head_size for attention in _arch(config).attention_layers}):
        if head_size % 2 or head_size > NATIVE_MAX_HEAD_SIZE:
            most = NATIVE_MAX_HEAD_SIZE
            return f"the native kernels need an even head_size of at most {most}, this model has {head_size}"
    return None


def _block_size_problem(config: QuireConfig) -> str | None:
    """Why the native CPU kernels cannot use the blocks that were asked for."""
    block_size = config.cache.block_size
    if block_size is None or block_size % NATIVE_BLOCK_UNIT == 0:
        return None
    return f"the native kernels need a block_size that is a multiple of {NATIVE_BLOCK_UNIT}, got {block_size}"


def _dtype_for(checkpoint: str, platform: Platform, is_native: bool) -> tuple[str, str]:
    """(dtype, reason) for weights stored as `checkpoint` ("" = not said)."""
    name = DTYPE_NAMES.get(checkpoint, checkpoint)
    if name not in KEEP_DTYPE:
        return "float32", f"the checkpoint's dtype is {name or 'not given'}"
    if name == "float32":
        return "float32", "the checkpoint is float32"
    if name == "bfloat16":
        if is_native or platform.has_fast_bfloat16:
            return "bfloat16", "the checkpoint is bfloat16"
        return "float32", f"the checkpoint is bfloat16, which this {platform.device} does not compute natively"
    if platform.is_cpu:
        return "float32", "the checkpoint is float16, which the CPU does not compute natively"
    return "float16", "the checkpoint is float16"


def _batch_defaults(context: ResolveContext) -> tuple[int, int, str]:
    """(max_num_batched_tokens, max_num_seqs, what they are for)."""
    is_server = context.usage is UsageContext.API_SERVER
    platform = context.platform
    if platform.is_cpu:
        return (2048, 128, "a CPU") if is_server else (4096, 256, "a CPU")
    if platform.memory_bytes >= 160 * GIB:
        return 16384, 1024, "a GPU of at least 160 GiB"
    if platform.memory_bytes >= 70 * GIB and not any("a100" in gpu.name.lower() for gpu in platform.gpus):
        return (8192 if is_server else 16384), 1024, "a GPU of at least 70 GiB"
    return (2048 if is_server else 8192), 256, "this GPU"
