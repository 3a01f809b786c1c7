"""Every environment variable Quire reads, in one place.

Read at call time, never at import. Settings belong in the config; these are for what must be known
before a config exists.
"""

from __future__ import annotations

import os


def log_level(default: str = "INFO") -> str:
    """QUIRE_LOG_LEVEL: DEBUG, INFO, WARNING or ERROR; `default` when it is not set."""
    return os.environ.get("QUIRE_LOG_LEVEL", default).upper()


def checks_enabled() -> bool:
    """QUIRE_CHECKS=1: keep every shape promise at run time, not only at kernel entry."""
    return os.environ.get("QUIRE_CHECKS", "0") == "1"


def hub_offline() -> bool:
    """HF_HUB_OFFLINE=1: never contact a model hub."""
    return os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0")
