"""vLLM's `logger`."""

from __future__ import annotations

import logging

from quire.logger import configure_logging

__all__ = ["init_logger"]


def init_logger(name: str) -> logging.Logger:
    """A logger below Quire's, whose lines reach stderr at the level of QUIRE_LOG_LEVEL."""
    configure_logging()
    return logging.getLogger("quire").getChild(name)
