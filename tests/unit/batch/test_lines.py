"""Lines of batch files."""

from __future__ import annotations

import json
from typing import Any

import pytest

from quire.batch.lines import BadLine, BatchRequest, error_line, read_line, result_line

GOOD = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "One"}}


def encoded(**changes: Any) -> bytes:
    return json.dumps({**GOOD, **changes}).encode()


def test_a_request_is_read():
    assert read_line(7, encoded()) == BatchRequest(7, "a", "/v1/completions", {"prompt": "One"})


@pytest.mark.parametrize(
    ("line", "custom_id", "word"),
    [
        (b"{broken", None, "JSON"), (b"\xff", None, "JSON"), (b"[" * 5000, None, "JSON"), (b"[1]", None, "object"),
        (encoded(custom_id=None), None, "custom_id"), (encoded(custom_id=7), None, "custom_id"),
        (encoded(custom_id=""), None, "custom_id"), (encoded(custom_id="x" * 1025), None, "custom_id"),
        (encoded(method="GET"), "a", "method"), (encoded(url="/v1/embeddings"), "a", "/v1/chat/completions"),
        (encoded(url=["/v1/completions"]), "a", "url"), (encoded(body="x"), "a", "body"),
        (encoded(body={"stream": True}), "a", "stream"),
    ],
    ids=[
        "broken", "no UTF-8", "deep", "list", "no id", "number", "empty id", "long id", "method", "url", "url list",
        "body", "stream",
    ],
)  # fmt: skip
def test_a_line_that_is_no_request_says_why(line: bytes, custom_id: str | None, word: str):
    bad = read_line(3, line)
    assert isinstance(bad, BadLine) and (bad.line, bad.custom_id) == (3, custom_id) and word in bad.message
    result = json.loads(error_line(bad))
    assert result["custom_id"] == custom_id and result["response"] is None and result["error"]["line"] == 3
    assert word in result["error"]["message"]


def test_a_result_is_one_line_with_the_answer_in_it():
    request = BatchRequest(1, "a", "/v1/completions", {})
    line = result_line(request, 200, "r-1", b'{\n "choices": [],\n "x": 1.5\n}')
    assert line.endswith(b"\n") and line.count(b"\n") == 1
    result = json.loads(line)
    assert result["id"].startswith("batch_req_") and result["custom_id"] == "a" and result["error"] is None
    assert result["response"] == {"status_code": 200, "request_id": "r-1", "body": {"choices": [], "x": 1.5}}
    html = json.loads(result_line(request, 502, "r-1", b"<html>"))
    assert html["response"]["body"]["error"]["message"] == "<html>"


def test_a_request_without_a_seed_gets_one_of_its_own():
    first, second = (BatchRequest(1, one, "/v1/completions", {"seed": None}) for one in "ab")
    assert first.with_seed(0)["seed"] == first.with_seed(0)["seed"] != second.with_seed(0)["seed"]
    assert first.with_seed(0)["seed"] != first.with_seed(1)["seed"]
    assert 0 <= first.with_seed(0)["seed"] < 2**62
    assert BatchRequest(1, "a", "/v1/completions", {"seed": 5}).with_seed(0)["seed"] == 5
    assert first.request_id != second.request_id
