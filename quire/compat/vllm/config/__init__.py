"""vLLM's `config`: objects of settings are plain dicts with checked keys; the whole is Quire's configuration."""

from __future__ import annotations

from typing import TypedDict

from quire.compat.absent import absent_class
from quire.compat.vllm.config.kv_transfer import ECTransferConfig, KVTransferConfig
from quire.compat.vllm.features import (
    COMPILATION,
    LORA,
    POOLING,
    PROFILER,
    WEIGHT_TRANSFER,
)
from quire.config import QuireConfig as VllmConfig
from quire.config.speculative import SpeculativeConfig

__all__ = [
    "CompilationConfig",
    "ECTransferConfig",
    "KVEventsConfig",
    "KVTransferConfig",
    "LoRAConfig",
    "PoolerConfig",
    "ProfilerConfig",
    "SpeculativeConfig",
    "StructuredOutputsConfig",
    "VllmConfig",
    "WeightTransferConfig",
]


class StructuredOutputsConfig(TypedDict, total=False):
    """How answers of a given form are made; for `structured_outputs_config`."""

    backend: str
    disable_any_whitespace: bool
    disable_additional_properties: bool
    reasoning_parser: str
    enable_in_reasoning: bool


class KVEventsConfig(TypedDict, total=False):
    """Events of the prefix cache for other programs; for `kv_events_config`."""

    enable_kv_cache_events: bool
    publisher: str
    endpoint: str
    replay_endpoint: str | None
    buffer_steps: int
    hwm: int
    max_queue_size: int
    topic: str


ProfilerConfig = absent_class("ProfilerConfig", PROFILER)
PoolerConfig = absent_class("PoolerConfig", POOLING)
WeightTransferConfig = absent_class("WeightTransferConfig", WEIGHT_TRANSFER)
CompilationConfig = absent_class("CompilationConfig", COMPILATION)
LoRAConfig = absent_class("LoRAConfig", LORA)
