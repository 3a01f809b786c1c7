"""vLLM's `envs`: the variables that its examples read, at their defaults. Quire reads QUIRE_* variables instead."""

from __future__ import annotations

__all__ = ["VLLM_HTTP_TIMEOUT_KEEP_ALIVE", "VLLM_USE_V1"]

VLLM_HTTP_TIMEOUT_KEEP_ALIVE = 5
VLLM_USE_V1 = True
