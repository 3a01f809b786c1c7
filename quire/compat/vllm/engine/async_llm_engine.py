"""vLLM's `engine.async_llm_engine`: the same class under its older name."""

from __future__ import annotations

from quire.compat.vllm.v1.engine.async_llm import AsyncLLM

__all__ = ["AsyncLLM"]

AsyncLLMEngine = AsyncLLM
