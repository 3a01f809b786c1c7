"""vLLM's `v1.engine.llm_engine`: Quire's engine with the arguments that vLLM's has besides."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.config import QuireConfig
from quire.core.sampling_params import SamplingParams
from quire.engine import llm_engine
from quire.errors import require_unset

__all__ = ["LLMEngine"]


class LLMEngine(llm_engine.LLMEngine):
    """Add requests, then call `step` until nothing is unfinished."""

    @classmethod
    def from_engine_args(  # type: ignore[override]
        cls, engine_args: Mapping[str, Any], usage_context: Any = None, stat_loggers: Any = None, **_: Any
    ) -> LLMEngine:
        """The engine that `engine_args` describe, its core in this process."""
        require_unset(stat_loggers=stat_loggers)
        engine: LLMEngine = super().from_engine_args(engine_args)  # type: ignore[assignment]
        return engine

    @classmethod
    def from_vllm_config(cls, vllm_config: QuireConfig, **_: Any) -> LLMEngine:
        """The engine that a configuration (`EngineArgs.create_engine_config`) describes."""
        engine: LLMEngine = super().from_engine_args(vllm_config)  # type: ignore[assignment]
        return engine

    def add_request(  # type: ignore[override]
        self,
        request_id: str,
        prompt: Any,
        params: SamplingParams,
        arrival_time: float | None = None,
        lora_request: Any = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        **others: Any,
    ) -> str:
        """Queue a request; arguments in vLLM's order. Raises as Quire's engine."""
        require_unset(lora_request=lora_request, tokenization_kwargs=tokenization_kwargs)
        return super().add_request(request_id, prompt, params, arrival_time, priority, **others)
