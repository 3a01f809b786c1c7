"""vLLM's `engine.protocol`."""

from __future__ import annotations

from quire.engine.protocol import EngineClient

__all__ = ["EngineClient"]
