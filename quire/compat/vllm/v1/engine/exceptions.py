"""vLLM's `v1.engine.exceptions`."""

from __future__ import annotations

from quire.errors import EngineDeadError, EngineGenerateError

__all__ = ["EngineDeadError", "EngineGenerateError"]
