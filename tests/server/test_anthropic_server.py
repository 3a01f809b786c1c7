"""What holds for chats holds for messages: limits of tenants, receipts, counts of the cache, traces, metrics, wire."""

from __future__ import annotations

import json
import re
from typing import Any

import anthropic
import httpx
import pytest

from quire.server.http.timing_breakdown import PHASES
from tests.server.anthropic_clients import HELLO, client
from tests.server.engines import ScriptedEngine
from tests.server.servers import RunningServer
from tests.server.test_anthropic_errors import COUNT, MESSAGES, PLAIN, error_of
from tests.server.test_protocol import post
from tests.server.test_tracing import Collector

FILE = """\
tenants:
  default: {keys: [operator-key-1]}
  red: {keys: [red-key-1234], requests_per_minute: 2, max_tokens: 50, max_priority: 0}
"""


def sse(answer: httpx.Response) -> list[tuple[str, Any]]:
    """(name, content) of each event of a stream."""
    events = []
    for block in answer.text.split("\n\n")[:-1]:
        name, data = block.split("\n")
        events.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    assert answer.text.endswith("\n\n") and all(name == content["type"] for name, content in events)
    return events


def test_a_stream_is_sse_with_names_and_a_ping(server):
    answer = post(server, MESSAGES, {**PLAIN, "stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    names = [name for name, _ in sse(answer)]
    assert names[:3] == ["message_start", "ping", "content_block_start"]
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert "[DONE]" not in answer.text


def test_the_clients_request_id_names_the_message(server):
    answer = post(server, MESSAGES, PLAIN, headers={"x-request-id": "job-7"})
    assert answer.json()["id"] == "msg_job-7" and answer.headers["request-id"] == "job-7"
    assert re.fullmatch(r"msg_[0-9a-f]{32}", post(server, MESSAGES, PLAIN).json()["id"])


def test_a_silent_stream_gets_comments_and_then_its_message():
    with RunningServer(ScriptedEngine(holds=True), sse_keep_alive_interval=1) as server:
        body = {**PLAIN, "stream": True}
        with httpx.stream("POST", server.url + MESSAGES, json=body, timeout=60) as answer:
            lines = answer.iter_lines()
            assert next(lines).startswith(":")
            server.engine.holds = False
            assert [line for line in lines if line.startswith("event: ")][-1] == "event: message_stop"


def test_tenants_have_their_limits(tmp_path, monkeypatch):
    monkeypatch.delenv("QUIRE_API_KEY", raising=False)
    path = tmp_path / "keys.yaml"
    path.write_text(FILE)
    with RunningServer(ScriptedEngine(), api_key_file=str(path)) as server:
        red = {"x-api-key": "red-key-1234"}
        assert error_of(post(server, MESSAGES, {**PLAIN, "max_tokens": 51}, headers=red))[0] == 400
        assert error_of(post(server, MESSAGES, {**PLAIN, "priority": 1}, headers=red))[0] == 400
        with client(server, api_key="red-key-1234") as own:
            for remaining in ("1", "0"):
                raw = own.messages.with_raw_response.create(**PLAIN)
                assert raw.headers["x-ratelimit-remaining-requests"] == remaining
            with pytest.raises(anthropic.RateLimitError):
                own.messages.count_tokens(model="leaf", messages=HELLO)
            with pytest.raises(anthropic.RateLimitError) as caught:
                own.messages.create(**PLAIN)
        assert int(caught.value.response.headers["retry-after"]) > 1
        assert server.engine.salts[0] == server.engine.salts[1] is not None, "a namespace of its own"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_message_shows_its_receipt_and_what_the_cache_did_when_asked_to(stream):
    with RunningServer(ScriptedEngine(interval_s=0.002), enable_per_request_metrics=True) as server:
        answer = post(server, MESSAGES, {**PLAIN, "max_tokens": 6, "stream": stream, "return_cache_info": True})
        told = sse(answer)[-2][1] if stream else answer.json()
    receipt = told["metrics"]
    assert round(sum(receipt[f"{phase}_ms"] for phase in PHASES), 3) == receipt["total_ms"]
    assert "prefix_cache" in told and told["usage"]["output_tokens"] == 6


def test_a_message_has_a_span_and_is_counted():
    with Collector() as collector:
        with RunningServer(ScriptedEngine(), otlp_traces_endpoint=collector.endpoint) as server:
            assert post(server, MESSAGES, {**PLAIN, "stream": True}).status_code == 200
            assert post(server, MESSAGES, {**PLAIN, "model": "other"}).status_code == 404
            page = httpx.get(server.url + "/metrics").text
        assert len(collector.requests()) == 2
    assert re.search(r'vllm:request_success_total{[^}]*finished_reason="length"[^}]*} 1\.0', page)
    assert re.search(r'quire:requests_refused_total{reason="not_found"[^}]*} 1\.0', page)


def test_both_paths_are_described(server):
    document = httpx.get(server.url + "/openapi.json").json()
    for path in (MESSAGES, COUNT):
        name = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
        schema = document["components"]["schemas"][name.rpartition("/")[2]]
        assert {"messages", "system", "tools"} <= set(schema["properties"])
