"""Logging for the package: one handler on the `quire` logger, configured by the entry points.

`get_logger(__name__)` anywhere; `configure_logging()` by `LLM`, the CLI, a server, an engine core. A record may carry
facts for programs, `logger.info(text, extra={"facts": {...}})`, which only JSON lines show. Owns no state beyond what
the standard `logging` module keeps.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import datetime, timezone

from quire import envs

FORMAT = "%(levelname)s %(asctime)s %(name)s: %(message)s"


def get_logger(name: str) -> logging.Logger:
    """The logger for module `name`."""
    return logging.getLogger(name)


def configure_logging(level: str | None = None, form: str | None = None) -> None:
    """Send the package's log to stderr; a later call changes level and form.

    Args:
        level: debug, info, warning or error, in either case; default: QUIRE_LOG_LEVEL.
        form: "text" or "json" (one object a line); default: QUIRE_LOG_FORMAT.

    Raises:
        ConfigError: a variable has a value of neither kind.
    """
    level, form = level or envs.log_level(), form or envs.log_format()
    logger = logging.getLogger("quire")
    logger.setLevel(level.upper())
    if not any(getattr(handler, "is_quire_handler", False) for handler in logger.handlers):
        own = logging.StreamHandler(sys.stderr)
        own.is_quire_handler = True  # type: ignore[attr-defined]
        logger.addHandler(own)
        logger.propagate = False
    for handler in logger.handlers:
        if getattr(handler, "is_quire_handler", False):
            handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter(FORMAT))


def adopt_logger(name: str) -> None:
    """Write another library's warnings where the package's log goes, in its form."""
    logging.getLogger(name).parent = logging.getLogger("quire")


class TextFormatter(logging.Formatter):
    """Lines for people: level, time (ISO 8601 with milliseconds and offset), logger, message."""

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        """The local time of a record."""
        return datetime.fromtimestamp(record.created).astimezone().isoformat(timespec="milliseconds")


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (UTC), level, logger, message, the record's facts, a traceback if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        """The line of a record."""
        line = {
            "time": datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "facts", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)
