"""Log lines for people and for programs."""

from __future__ import annotations

import json
import logging
import re
from datetime import datetime

import pytest

from quire.logger import FORMAT, JsonFormatter, TextFormatter, configure_logging


def record(message: str = "%d pages", *args: object, **fields: object) -> logging.LogRecord:
    made = logging.LogRecord("quire.test", logging.WARNING, "file", 1, message, args or (3,), None)
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def test_a_line_of_text_has_date_time_and_offset():
    line = TextFormatter(FORMAT).format(record())
    assert re.fullmatch(r"WARNING \d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}[+-]\d\d:\d\d quire\.test: 3 pages", line)


def test_a_line_of_json_has_facts_and_a_traceback():
    try:
        raise ValueError("broken\nline")
    except ValueError as error:
        made = record(facts={"id": "a", "path": object}, exc_info=(ValueError, error, error.__traceback__))
    line = JsonFormatter().format(made)
    values = json.loads(line)
    assert "\n" not in line and values["message"] == "3 pages" and values["id"] == "a"
    assert values["level"] == "warning" and "broken" in values["exception"]
    assert datetime.fromisoformat(values["time"]).utcoffset().total_seconds() == 0


@pytest.fixture
def logger(monkeypatch):
    logger = logging.getLogger("quire")
    monkeypatch.setattr(logger, "handlers", [])
    monkeypatch.setattr(logger, "propagate", logger.propagate)
    level = logger.level
    yield logger
    logger.setLevel(level)


def test_a_second_call_changes_level_and_form_and_adds_no_handler(logger, monkeypatch):
    monkeypatch.delenv("QUIRE_LOG_FORMAT", raising=False)
    configure_logging("warning")
    assert logger.level == logging.WARNING
    configure_logging("debug", "json")
    (handler,) = [one for one in logger.handlers if hasattr(one, "is_quire_handler")]
    assert logger.level == logging.DEBUG and isinstance(handler.formatter, JsonFormatter)
    monkeypatch.setenv("QUIRE_LOG_FORMAT", "json")
    configure_logging("info")
    assert isinstance(handler.formatter, JsonFormatter)
