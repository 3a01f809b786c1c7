"""vLLM's `entrypoints.llm`."""

from __future__ import annotations

from quire.entrypoints.llm import LLM

__all__ = ["LLM"]
