"""vLLM's `distributed`: one process is all there is, so there is nothing to tear down."""

from __future__ import annotations

import gc

__all__ = ["cleanup_dist_env_and_memory"]


def cleanup_dist_env_and_memory(shutdown_ray: bool = False) -> None:
    """Collect what dropped engines leave behind."""
    gc.collect()
