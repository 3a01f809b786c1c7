"""vLLM's `config`: objects of settings are plain dicts with checked keys; the whole is Quire's configuration."""

from __future__ import annotations

from typing import Any, TypedDict

from quire.compat.absent import absent_class
from quire.compat.vllm.config.kv_transfer import ECTransferConfig, KVTransferConfig
from quire.compat.vllm.features import LORA, POOLING, WEIGHT_TRANSFER
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


class ProfilerConfig(TypedDict, total=False):
    """How steps are profiled once that is started; for `profiler_config`."""

    profiler: str
    torch_profiler_dir: str
    torch_profiler_record_shapes: bool
    torch_profiler_with_stack: bool
    delay_iterations: int
    max_iterations: int


class CompilationConfig(TypedDict, total=False):
    """For `compilation_config`, which is accepted without effect: nothing is compiled at startup."""

    mode: Any
    level: int
    backend: str
    cudagraph_mode: Any
    cudagraph_capture_sizes: list[int]
    custom_ops: list[str]


PoolerConfig = absent_class("PoolerConfig", POOLING)
WeightTransferConfig = absent_class("WeightTransferConfig", WEIGHT_TRANSFER)
LoRAConfig = absent_class("LoRAConfig", LORA)
