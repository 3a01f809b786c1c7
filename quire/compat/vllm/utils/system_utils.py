"""vLLM's `utils.system_utils`."""

from __future__ import annotations

import resource

__all__ = ["set_ulimit"]


def set_ulimit(target_soft_limit: int = 65535) -> None:
    """Raise the limit of open files to `target_soft_limit`, as far as the hard limit allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = target_soft_limit if hard == resource.RLIM_INFINITY else min(target_soft_limit, hard)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
