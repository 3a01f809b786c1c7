"""Logging for the package: one handler on the `quire` logger, configured by the entry points.

`get_logger(__name__)` anywhere; `configure_logging()` once by `LLM`, the CLI or a server. Owns no state
beyond what the standard `logging` module keeps.
"""

from __future__ import annotations

import logging
import sys

from quire import envs

FORMAT = "%(levelname)s %(asctime)s %(name)s: %(message)s"


def get_logger(name: str) -> logging.Logger:
    """The logger for module `name`."""
    return logging.getLogger(name)


def configure_logging(level: str | None = None) -> None:
    """Send the package's log to stderr at `level` (default: QUIRE_LOG_LEVEL); harmless when repeated."""
    logger = logging.getLogger("quire")
    logger.setLevel(level or envs.log_level())
    if not any(getattr(handler, "is_quire_handler", False) for handler in logger.handlers):
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter(FORMAT, datefmt="%H:%M:%S"))
        handler.is_quire_handler = True  # type: ignore[attr-defined]
        logger.addHandler(handler)
        logger.propagate = False
