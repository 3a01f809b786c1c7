"""Every environment variable Quire reads, in one place.

Read at call time, never at import. Settings belong in the config; these are for what must be known
before a config exists.
"""

from __future__ import annotations

import os
from pathlib import Path


def log_level(default: str = "INFO") -> str:
    """QUIRE_LOG_LEVEL: DEBUG, INFO, WARNING or ERROR; `default` when it is not set."""
    return os.environ.get("QUIRE_LOG_LEVEL", default).upper()


def log_format() -> str:
    """QUIRE_LOG_FORMAT: text or json."""
    return os.environ.get("QUIRE_LOG_FORMAT", "text").lower()


def omp_num_threads() -> int | None:
    """OMP_NUM_THREADS: most compute threads on the CPU, as other numeric libraries read it; None = not set."""
    value = os.environ.get("OMP_NUM_THREADS", "")
    return int(value) if value.isdecimal() and int(value) > 0 else None


def cache_dir() -> Path | None:
    """QUIRE_CACHE_DIR: where Quire keeps what it can make again; by default `quire` in the user's cache directory.

    None where neither the variable nor a home directory says where that is.
    """
    own, shared = os.environ.get("QUIRE_CACHE_DIR", ""), os.environ.get("XDG_CACHE_HOME", "")
    if own:
        return Path(own).expanduser()
    if os.path.isabs(shared):  # others are invalid and ignored, says the XDG base directory specification
        return Path(shared) / "quire"
    try:
        return Path.home() / ".cache" / "quire"
    except RuntimeError:
        return None


def kernel_tier() -> str | None:
    """QUIRE_KERNEL_TIER: what `kernel_tier="auto"` stands for, so that a whole run uses one tier; None = the best."""
    return os.environ.get("QUIRE_KERNEL_TIER") or None


def native_library() -> Path | None:
    """QUIRE_NATIVE_LIBRARY: a build of the native kernels to load in place of the installed one; None = not set.

    For builds with sanitizers and of other compilers; processes started by this one inherit it.
    """
    value = os.environ.get("QUIRE_NATIVE_LIBRARY", "")
    return Path(value) if value else None


def api_key() -> str | None:
    """QUIRE_API_KEY: a key that requests to the server must show; None = not set."""
    return os.environ.get("QUIRE_API_KEY") or None


def openai_api_key() -> str | None:
    """OPENAI_API_KEY: a key to show to a server, as OpenAI's clients read it; None = not set."""
    return os.environ.get("OPENAI_API_KEY") or None


def prefer_sleeping_threads() -> None:
    """Let idle compute threads sleep early (GOMP_SPINCOUNT=10000), unless the user set a policy of their own.

    By default GNU OpenMP's threads spin for milliseconds while they wait. When another process wants the same CPUs,
    each parallel loop of a small model then takes a scheduler's time slice. 10000 turns cost nothing on an idle
    machine (docs/LOG.md). Read by libgomp when torch is loaded, so it has no effect after that.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")
