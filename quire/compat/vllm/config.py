"""vLLM's `config`: objects of settings are plain dicts with checked keys; the whole is Quire's configuration."""

from __future__ import annotations

from typing import Any, TypedDict

from quire.compat.absent import module_getattr
from quire.compat.vllm.features import (
    COMPILATION,
    KV_TRANSFER,
    LORA,
    POOLING,
    PROFILER,
    SPECULATION,
    WEIGHT_TRANSFER,
)
from quire.config import QuireConfig as VllmConfig

__all__ = ["KVEventsConfig", "StructuredOutputsConfig", "VllmConfig"]


class StructuredOutputsConfig(TypedDict, total=False):
    """How answers of a given form are made; for `structured_outputs_config`."""

    backend: str
    disable_any_whitespace: bool
    disable_additional_properties: bool
    reasoning_parser: str
    enable_in_reasoning: bool


class KVEventsConfig(TypedDict, total=False):
    """What other programs are told of the prefix cache; for `kv_events_config`."""

    enable_kv_cache_events: bool
    publisher: str
    endpoint: str
    replay_endpoint: str | None
    buffer_steps: int
    hwm: int
    max_queue_size: int
    topic: str


_ABSENT: dict[str, Any] = {
    "KVTransferConfig": KV_TRANSFER,
    "ECTransferConfig": KV_TRANSFER,
    "ProfilerConfig": PROFILER,
    "PoolerConfig": POOLING,
    "WeightTransferConfig": WEIGHT_TRANSFER,
    "CompilationConfig": COMPILATION,
    "SpeculativeConfig": SPECULATION,
    "LoRAConfig": LORA,
}

__getattr__ = module_getattr(__name__, absent_names=_ABSENT)
