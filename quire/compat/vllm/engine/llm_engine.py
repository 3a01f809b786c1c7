"""vLLM's `engine.llm_engine`."""

from __future__ import annotations

from quire.compat.vllm.v1.engine.llm_engine import LLMEngine

__all__ = ["LLMEngine"]
