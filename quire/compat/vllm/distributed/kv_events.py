"""vLLM's `distributed.kv_events`: what is published of the prefix cache."""

from __future__ import annotations

from quire.core.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch

__all__ = ["AllBlocksCleared", "BlockRemoved", "BlockStored", "KVEventBatch"]
