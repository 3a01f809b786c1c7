"""A tiny random Llama in float32 and a config that is as `resolve` would leave it. No files."""

from __future__ import annotations

import dataclasses
from typing import Any

from quire.config import (
    CacheConfig,
    DeviceConfig,
    LoadConfig,
    ModelArch,
    ModelConfig,
    QuireConfig,
    SchedulerConfig,
)
from quire.config.families.registry import parse_config
from quire.core.kv_spec import KVCacheConfig, KVCacheGroupSpec
from quire.executor.base import Executor
from quire.platforms import Platform
from quire.utils.memory import GIB, MemoryInfo

VOCAB_SIZE = 211
NUM_BLOCKS = 1200


def tiny_arch(**fields: Any) -> ModelArch:
    """A Llama; `fields` are of its config.json."""
    raw = {
        "architectures": ["LlamaForCausalLM"], "vocab_size": VOCAB_SIZE, "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "initializer_range": 0.4,
    }  # fmt: skip
    return parse_config({**raw, **fields})


TINY_ARCH = tiny_arch()


def tiny_config(**overrides: Any) -> QuireConfig:
    """`overrides` are fields of any part; all parts are resolved."""
    config = QuireConfig(
        model=ModelConfig(model="tiny", dtype="float32", max_model_len=128, seed=3),
        load=LoadConfig(load_format="dummy"),
        cache=CacheConfig(block_size=4, kv_cache_dtype="float32"),
        scheduler=SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=4096),
        device=DeviceConfig(device="cpu", num_threads=1, attention_backend="torch_reference"),
        arch=TINY_ARCH,
    )
    for name, value in overrides.items():
        if name == "arch":
            config = dataclasses.replace(config, arch=value)
            continue
        (part,) = (
            part
            for part in ("model", "load", "cache", "scheduler", "device")
            if name in {field.name for field in dataclasses.fields(getattr(config, part))}
        )
        config = dataclasses.replace(config, **{part: dataclasses.replace(getattr(config, part), **{name: value})})
    return config


def cpu_platform(available_bytes: int = 4 * GIB) -> Platform:
    """A CPU with this much memory left."""
    return Platform(
        device="cpu",
        cpu_name="test",
        cpu_flags=frozenset(),
        num_cpus=1,
        memory=MemoryInfo(total_bytes=8 * GIB, available_bytes=available_bytes, limited_by="test"),
    )


def cache_config(executor: Executor, num_blocks: int = NUM_BLOCKS) -> KVCacheConfig:
    """One group of all layers."""
    specs = executor.kv_cache_specs()
    group = KVCacheGroupSpec(layer_names=tuple(specs), spec=next(iter(specs.values())))
    return KVCacheConfig(num_blocks=num_blocks, groups=(group,))
