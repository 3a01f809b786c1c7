"""The log line of a request: its facts, and one id in log, header and answer."""

from __future__ import annotations

import json
import logging

import httpx
import pytest

from quire.logger import JsonFormatter
from tests.server.test_protocol import CHAT, HELLO, post


@pytest.fixture
def lines(server, caplog, monkeypatch):
    """The facts of the requests that ended so far."""
    monkeypatch.setattr(logging.getLogger("quire"), "propagate", True)
    caplog.set_level("INFO", "quire.access")

    def facts(path: str) -> dict:
        found = []

        def is_logged() -> bool:  # a line is written after its answer
            found[:] = [one for one in caplog.records if one.name == "quire.access" and path in one.getMessage()]
            return bool(found)

        server.wait_until(is_logged)
        return json.loads(JsonFormatter().format(found[-1])) | {"text": found[-1].getMessage()}

    return facts


def test_log_header_and_answer_have_one_id(server, lines):
    answer = post(server, CHAT, {**HELLO, "max_tokens": 3})
    line = lines(CHAT)
    assert line["id"] == answer.json()["id"] == "chatcmpl-" + answer.headers["x-request-id"]
    assert line["id"] in line["text"] and "x_request_id" not in line


def test_a_line_has_what_a_request_cost_and_whose_it_was(server, lines):
    usage = post(server, CHAT, {**HELLO, "max_tokens": 3, "request_id": "mine"}).json()["usage"]
    line = lines(CHAT)
    assert {name: line[name] for name in ("method", "path", "status", "client", "level", "logger")} == {
        "method": "POST", "path": CHAT, "status": 200, "client": "127.0.0.1", "level": "info", "logger": "quire.access",
    }  # fmt: skip
    assert (line["prompt_tokens"], line["completion_tokens"]) == (usage["prompt_tokens"], usage["completion_tokens"])
    assert line["id"] == "chatcmpl-mine" and line["x_request_id"] and line["seconds"] >= 0


def test_a_request_without_an_answer_has_its_own_id(server, lines):
    answer = httpx.get(server.url + "/nowhere", headers={"x-request-id": "trace-7"})
    assert answer.headers["x-request-id"] == lines("/nowhere")["id"] == "trace-7"
