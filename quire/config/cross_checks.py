"""Rules between settings, the model and the machine: what one field's range cannot say.

Called by `config.resolve` and, for what needs no model, by `entrypoints.args`. Pure.
"""

from __future__ import annotations

from quire.config.cache import FP8_KV_CACHE_DTYPES
from quire.config.engine import QuireConfig
from quire.config.model import ONLINE_QUANTIZATIONS
from quire.config.quantized_checkpoint import checkpoint_format
from quire.errors import ConfigError, UnsupportedError
from quire.platforms.interface import Platform


def check_supported(config: QuireConfig) -> None:
    """Raise for settings that are known but not honoured (yet); needs no model."""
    if config.observability.kv_events.enable_kv_cache_events and not config.cache.enable_prefix_caching:
        raise ConfigError(
            "kv_events_config needs enable_prefix_caching", hint="enable prefix caching, or leave out kv_events_config",
            field="kv_events_config",
        )  # fmt: skip
    if config.cache.offload_field is not None:
        _check_offload(config, config.cache.offload_field)
    if config.kv_transfer is not None:
        _check_connector(config)
    if config.cache.sparse_attention_blocks is not None:
        _check_sparse(config)
    if config.observability.flight_recorder is not None and config.scheduler.has_plugin:
        raise UnsupportedError(
            "flight_recorder records Quire's own scheduler only, and a scheduler plugin is configured",
            hint="leave out flight_recorder or the plugin", field="flight_recorder",
        )  # fmt: skip
    if config.speculative is not None and not config.speculative.is_off and config.scheduler.scheduler_cls is not None:
        raise UnsupportedError(
            "speculative_config is of Quire's own scheduler, and a scheduler plugin is configured",
            hint="leave out speculative_config or scheduler_cls", field="speculative_config",
        )  # fmt: skip
    if config.parallel.data_parallel_size > 1:
        _check_replicas(config)


def _check_replicas(config: QuireConfig) -> None:
    """What several replicas cannot be combined with."""
    if config.observability.flight_recorder is not None and config.scheduler.scheduling_policy == "fair":
        raise UnsupportedError(
            "flight_recorder cannot be combined with scheduling_policy='fair' and data_parallel_size > 1: a recording "
            "of one replica does not hold what tenants were served by the others",
            hint="leave out flight_recorder, or use data_parallel_size=1", field="flight_recorder",
        )  # fmt: skip


def _check_offload(config: QuireConfig, field: str) -> None:
    if not config.cache.enable_prefix_caching:
        hint = f"enable prefix caching, or leave out {field}"
        raise ConfigError(f"{field} needs enable_prefix_caching", hint=hint, field=field)
    others = {
        "flight_recorder": config.observability.flight_recorder is not None,
        "scheduler_cls": config.scheduler.scheduler_cls is not None,
    }
    for name, is_set in others.items():
        if is_set:
            hint = f"leave out {field} or {name}"
            raise UnsupportedError(f"{field} is not supported together with {name}", hint=hint, field=field)


def _check_connector(config: QuireConfig) -> None:
    """What a KV connector cannot be combined with."""
    others = {
        "flight_recorder": (
            config.observability.flight_recorder is not None,
            "recordings do not hold what it does",
        ),
        "scheduler_cls": (config.scheduler.scheduler_cls is not None, "it is called by Quire's own scheduler"),
    }
    for name, (is_set, why) in others.items():
        if is_set:
            raise UnsupportedError(
                f"kv_transfer_config cannot be combined with {name}: {why}", hint=f"leave out {name} or it", field=name
            )
    if not config.cache.enable_prefix_caching:
        raise ConfigError(
            "kv_transfer_config needs enable_prefix_caching, which names the blocks",
            hint="enable prefix caching, or leave out kv_transfer_config", field="kv_transfer_config",
        )  # fmt: skip


def _check_sparse(config: QuireConfig) -> None:
    """What attention to some blocks cannot be combined with: whatever changes blocks where no layer writes them."""
    cache = config.cache
    others = {
        "swap_space": bool(cache.swap_space),
        cache.offload_field or "kv_disk": cache.offload_field is not None,
        "kv_transfer_config": config.kv_transfer is not None,
        "speculative_config": config.speculative is not None and not config.speculative.is_off,
        "tensor_parallel_size": config.parallel.tensor_parallel_size > 1,  # heads of all processes would have to agree
    }
    for name, is_set in others.items():
        if is_set:
            raise UnsupportedError(
                f"sparse_attention_blocks is not supported together with {name}",
                hint=f"leave out sparse_attention_blocks or {name}", field="sparse_attention_blocks",
            )  # fmt: skip


def _check_sparse_model(config: QuireConfig) -> None:
    """Where blocks cannot be chosen by their keys."""
    if config.cache.sparse_attention_blocks is None:
        return
    assert config.arch is not None, "checked after the rules have run"
    backend, dtype = config.device.attention_backend, config.cache.kv_cache_dtype
    reasons = {
        f"attention_backend={backend!r}": backend not in ("native_cpu", "torch_reference"),
        f"kv_cache_dtype={dtype!r}": dtype in FP8_KV_CACHE_DTYPES,
        f"latent attention, which {config.arch.architecture} has": any(
            layer.latent_attention is not None for layer in config.arch.layers
        ),
    }
    for reason, holds in reasons.items():
        if holds:
            raise UnsupportedError(
                f"sparse_attention_blocks is not supported with {reason}",
                hint="leave out sparse_attention_blocks", field="sparse_attention_blocks",
            )  # fmt: skip


def check_device(config: QuireConfig, platform: Platform) -> None:
    """Raise when the device asked for is not the one the platform describes."""
    asked = config.device.device
    if asked != "auto" and asked != platform.device:
        raise ConfigError(
            f"device={asked!r} cannot be used: this machine has {platform.describe()}",
            hint=f"use device='{platform.device}' or 'auto'",
            field="device",
        )


def check_against_model(config: QuireConfig) -> None:
    """Raise when lengths or types do not fit the model."""
    assert config.arch is not None and config.model.max_model_len is not None, "checked after the rules have run"
    limit, asked = config.arch.max_position_embeddings, config.model.max_model_len
    if asked > limit:
        raise ConfigError(
            f"max_model_len={asked} is longer than the model's own limit of {limit} tokens",
            hint=f"use max_model_len <= {limit}",
            field="max_model_len",
        )
    _check_kv_cache_dtype(config)
    _check_sparse_model(config)
    _check_quantization(config)
    threshold = config.scheduler.long_prefill_token_threshold
    if threshold > asked:
        raise ConfigError(
            f"long_prefill_token_threshold={threshold} is larger than max_model_len={asked}",
            hint=f"use long_prefill_token_threshold <= {asked}",
            field="long_prefill_token_threshold",
        )


def _check_quantization(config: QuireConfig) -> None:
    assert config.arch is not None, "checked after the rules have run"
    asked, stored = config.model.quantization, config.arch.quantization
    if asked is None:
        return
    method = checkpoint_format(asked)
    if stored is not None and method != stored.method and (method is not None or asked in ONLINE_QUANTIZATIONS):
        raise ConfigError(
            f"quantization={asked!r} does not match the checkpoint, whose weights are in {stored.method}",
            hint=f"leave out quantization, or use {stored.method}: they are computed as they are stored",
            field="quantization",
        )
    if stored is None and method is not None and asked not in ONLINE_QUANTIZATIONS:
        raise ConfigError(
            f"quantization={asked!r} needs a checkpoint in that format; the config.json of this one has no "
            "quantization_config",
            hint=f"leave it out, or quantize while loading: {', '.join(ONLINE_QUANTIZATIONS)}",
            field="quantization",
        )
    if stored is None and method is not None and config.model.dtype != "bfloat16":
        raise UnsupportedError(
            f"quantization={asked!r} needs dtype='bfloat16', but dtype is {config.model.dtype!r}",
            hint="use dtype='bfloat16', or quantization='int8'", field="quantization",
        )  # fmt: skip
    if stored is None and asked in ONLINE_QUANTIZATIONS and config.device.attention_backend != "native_cpu":
        raise UnsupportedError(
            f"quantization={asked!r} needs the native CPU kernels, but attention_backend is "
            f"{config.device.attention_backend}",
            hint="use device='cpu' with attention_backend='native_cpu', or leave out quantization",
            field="quantization",
        )


def _check_kv_cache_dtype(config: QuireConfig) -> None:
    given, dtype, backend = config.cache.kv_cache_dtype, config.model.dtype, config.device.attention_backend
    if given in FP8_KV_CACHE_DTYPES:
        assert config.arch is not None, "checked after the rules have run"
        if any(layer.latent_attention is not None for layer in config.arch.layers):
            raise UnsupportedError(
                f"kv_cache_dtype={given!r} is not supported for latent attention, which {config.arch.architecture} has",
                hint="leave out kv_cache_dtype: a latent takes a fraction of the memory of keys and values",
                field="kv_cache_dtype",
            )
        if dtype != "bfloat16" or backend != "native_cpu":
            raise UnsupportedError(
                f"kv_cache_dtype={given!r} needs dtype='bfloat16' and attention_backend='native_cpu', but "
                f"dtype={dtype!r} and attention_backend={backend!r} are set",
                hint="use dtype='bfloat16' with attention_backend='native_cpu' on a CPU, or leave out kv_cache_dtype",
                field="kv_cache_dtype",
            )
    elif given != dtype:
        raise UnsupportedError(
            f"kv_cache_dtype={given!r} differs from dtype={dtype!r}",
            hint="leave out kv_cache_dtype, or use fp8_e4m3 or fp8_e5m2 with dtype='bfloat16'",
            field="kv_cache_dtype",
        )


def check_batch(config: QuireConfig) -> None:
    """Raise when the limits of a step contradict each other."""
    tokens, seqs = config.scheduler.max_num_batched_tokens, config.scheduler.max_num_seqs
    max_model_len = config.model.max_model_len
    assert tokens is not None and seqs is not None and max_model_len is not None, "checked after the rules have run"
    if seqs > tokens:
        raise ConfigError(
            f"max_num_seqs={seqs} is larger than max_num_batched_tokens={tokens}, and each request needs one "
            "token per step",
            hint=f"use max_num_seqs <= {tokens}, or max_num_batched_tokens >= {seqs}",
            field="max_num_seqs",
        )
    _check_swap(config)
    if config.scheduler.max_decode_slowdown and not config.scheduler.enable_chunked_prefill:
        raise ConfigError(
            f"max_decode_slowdown={config.scheduler.max_decode_slowdown} needs chunked prefill, which is off",
            hint="enable chunked prefill, or use max_decode_slowdown=0",
            field="max_decode_slowdown",
        )
    if not config.scheduler.enable_chunked_prefill and tokens < max_model_len:
        raise ConfigError(
            f"max_num_batched_tokens={tokens} is less than max_model_len={max_model_len} and chunked prefill is off",
            hint=f"use max_num_batched_tokens >= {max_model_len}, a smaller max_model_len, or enable_chunked_prefill",
            field="max_num_batched_tokens",
        )


def _check_swap(config: QuireConfig) -> None:
    mode, swap_space = config.scheduler.preemption_mode, config.cache.swap_space
    if mode == "swap" and not swap_space:
        raise ConfigError(
            "preemption_mode='swap' needs swap_space, which is 0",
            hint="set swap_space in GiB, or leave out preemption_mode",
            field="swap_space",
        )
    if mode == "recompute" and swap_space:
        raise ConfigError(
            f"swap_space={swap_space:g} is never used with preemption_mode='recompute'",
            hint="use preemption_mode='auto' or 'swap', or leave out swap_space",
            field="swap_space",
        )
