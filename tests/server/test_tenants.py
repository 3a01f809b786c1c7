"""Tenants against a running server: limits with what OpenAI's clients are told, and that none learns of another."""

from __future__ import annotations

import os
import threading

import httpx
import openai
import pytest

from quire.server.http import key_watch
from tests.server.engines import ScriptedEngine, scripted_config
from tests.server.servers import RunningServer
from tests.server.test_protocol import CHAT, HELLO, error_of, events, post
from tests.server.test_safety import bearer

COMPLETE = "/v1/completions"
FILE = """\
tenants:
  default: {keys: [operator-key-1]}
  red: {keys: [red-key-1234], requests_per_minute: 3, tokens_per_minute: 200, max_tokens: 50, max_priority: 0}
  blue: {keys: [blue-key-1234], max_concurrent: 1, queue_share: 0.5}
"""
PROMPT = {"prompt": [7] * 10, "max_tokens": 5}


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.delenv("QUIRE_API_KEY", raising=False)
    path = tmp_path / "keys.yaml"
    path.write_text(FILE)
    return path


@pytest.fixture
def server(file):
    with RunningServer(ScriptedEngine(), api_key_file=str(file), max_num_queued_reqs=8) as running:
        yield running


def ask(server: RunningServer, path: str, body: dict[str, object], headers: dict[str, str]) -> httpx.Response:
    return post(server, path, body, headers=headers)


def samples(server: RunningServer, name: str) -> dict[str, float]:
    page = httpx.get(server.url + "/metrics", headers=bearer("operator-key-1")).text
    lines = [line.rpartition(" ") for line in page.splitlines() if line.startswith(name + "{")]
    return {labels.removeprefix(name): float(value) for labels, _, value in lines if float(value)}


def test_openais_client_sees_a_rate_limit_and_when_to_come_back(server):
    client = server.client(api_key="red-key-1234")
    for remaining in (2, 1, 0):
        raw = client.completions.with_raw_response.create(model="leaf", **PROMPT)
        assert raw.headers["x-ratelimit-limit-requests"] == "3"
        assert raw.headers["x-ratelimit-remaining-requests"] == str(remaining)
    assert raw.headers["x-ratelimit-limit-tokens"] == "200"
    assert 200 - 3 * 15 <= int(raw.headers["x-ratelimit-remaining-tokens"]) <= 200 - 3 * 15 + 10
    with pytest.raises(openai.RateLimitError) as caught:
        client.completions.create(model="leaf", **PROMPT)
    assert (caught.value.code, caught.value.type) == ("rate_limit_exceeded", "requests")
    headers = caught.value.response.headers
    assert 15_000 < int(headers["retry-after-ms"]) <= 20_000 and int(headers["retry-after"]) <= 20
    assert headers["x-ratelimit-remaining-requests"] == "0"


def test_a_tenant_at_its_limit_is_refused_before_its_body_is_looked_at(server):
    for _ in range(3):
        assert ask(server, COMPLETE, PROMPT, bearer("red-key-1234")).status_code == 200
    for path in (COMPLETE, CHAT, "/v1/responses", "/v1/messages"):
        headers = bearer("red-key-1234") | {"content-type": "application/json"}
        assert httpx.post(server.url + path, content=b"{ not JSON", headers=headers).status_code == 429
        headers = bearer("operator-key-1") | {"content-type": "application/json"}
        assert httpx.post(server.url + path, content=b"{ not JSON", headers=headers).status_code == 400


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_prompt_and_new_tokens_are_charged(server, stream):
    for n in (1, 2):
        answer = ask(server, COMPLETE, {**PROMPT, "n": n, "max_tokens": 20, "stream": stream}, bearer("red-key-1234"))
        assert answer.status_code == 200
    red = server.state.tenants.of(b"Bearer red-key-1234")
    used = 200 - int(dict(red.headers())[b"x-ratelimit-remaining-tokens"])
    assert 10 + 20 + 10 + 40 - 10 <= used <= 80


def test_limits_change_no_answer(server):
    body = {"prompt": [[7] * 10, [9] * 12], "n": 2, "max_tokens": 6, "logprobs": 2, "return_token_ids": True}
    answers = [ask(server, COMPLETE, body, bearer(key)).json() for key in ("red-key-1234", "operator-key-1")]
    assert answers[0]["choices"] == answers[1]["choices"] and answers[0]["usage"] == answers[1]["usage"]


def test_an_answer_that_is_given_up_is_charged_for_what_was_computed(file):
    class StopsAtFive(ScriptedEngine):
        def _fail(self, position: int) -> None:
            self.holds = position == 5

    engine = StopsAtFive()
    with RunningServer(engine, api_key_file=str(file), max_num_queued_reqs=8) as server:
        server.give_up(COMPLETE, {**PROMPT, "max_tokens": 50}, lambda: engine.holds, "Bearer red-key-1234")
        server.wait_until(lambda: not engine.live)
        red = server.state.tenants.of(b"Bearer red-key-1234")
        remaining = int(dict(red.headers())[b"x-ratelimit-remaining-tokens"])
        assert 140 <= remaining < 190, "more than the prompt, less than all"
        assert red.num_requests == 0


def test_max_tokens_and_priority_are_refused_with_both_numbers(server):
    for fields, param, numbers in (
        ({"max_tokens": 51}, "max_tokens", ("51", "50")), ({"priority": 1}, "priority", ("1", "0")),
    ):  # fmt: skip
        answer = ask(server, COMPLETE, {**PROMPT, **fields}, bearer("red-key-1234"))
        assert answer.status_code == 400 and error_of(answer)["param"] == param
        assert all(number in error_of(answer)["message"] for number in numbers)
    answer = ask(server, CHAT, HELLO | {"max_tokens": None}, bearer("red-key-1234")).json()
    assert answer["usage"]["completion_tokens"] == 50, "what is left open is the tenant's most"


def test_the_priority_header_wins_over_the_field(server):
    for headers, field, expected in (
        ({}, None, 0), ({}, 5, 5), ({"X-Vllm-Priority": "-7"}, 5, -7), ({"X-Vllm-Priority": "3"}, None, 3),
    ):  # fmt: skip
        ask(server, COMPLETE, {**PROMPT, "priority": field}, bearer("operator-key-1") | headers)
        assert server.engine.priorities[-1] == expected
    for header in ("soon", "1.5", "99999999999999999999", ""):
        answer = ask(server, COMPLETE, PROMPT, bearer("operator-key-1") | {"X-Vllm-Priority": header})
        assert answer.status_code == 400 and error_of(answer)["param"] == "priority"


def test_one_request_at_a_time_when_so_limited(file):
    engine = ScriptedEngine(holds=True)
    with RunningServer(engine, api_key_file=str(file), max_num_queued_reqs=8) as server:
        results: list[httpx.Response] = []
        thread = threading.Thread(target=lambda: results.append(ask(server, COMPLETE, PROMPT, bearer("blue-key-1234"))))
        thread.start()
        server.wait_until(lambda: engine.live)
        refused = ask(server, COMPLETE, PROMPT, bearer("blue-key-1234"))
        assert refused.status_code == 429 and refused.json()["error"]["code"] == "rate_limit_exceeded"
        assert refused.headers["retry-after"] == "1"
        load = [httpx.get(server.url + "/load", headers=bearer(key)).json()["server_load"] for key in (
            "operator-key-1", "red-key-1234", "blue-key-1234",
        )]  # fmt: skip
        assert load == [1, 0, 1], "who may not see all sees its own"
        engine.holds = False
        thread.join()
        assert results[0].status_code == 200
        assert ask(server, COMPLETE, PROMPT, bearer("blue-key-1234")).status_code == 200


def test_no_tenant_learns_of_another(file):
    engine = ScriptedEngine(config=scripted_config(max_num_seqs=1), holds=True)
    with RunningServer(engine, api_key_file=str(file), max_num_queued_reqs=1) as server:
        threads = [
            threading.Thread(target=ask, args=(server, COMPLETE, PROMPT, bearer("operator-key-1"))) for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        server.wait_until(lambda: len(engine.live) == 2)
        full = ask(server, COMPLETE, PROMPT, bearer("red-key-1234"))
        assert full.status_code == 429 and error_of(full)["type"] == "RateLimitError"
        seen = full.text
        for path in ("/metrics", "/load", "/openapi.json", "/v1/models", "/nothing"):
            seen += httpx.get(server.url + path, headers=bearer("red-key-1234")).text
        assert not any(word in seen for word in ("blue", "operator-key"))
        metrics = httpx.get(server.url + "/metrics", headers=bearer("red-key-1234"))
        assert metrics.status_code == 403 and error_of(metrics)["type"] == "PermissionDeniedError"
        engine.holds = False
        for thread in threads:
            thread.join()


def test_who_is_alone_may_read_the_metrics(file):
    file.write_text("tenants:\n  red: {keys: [red-key-1234]}\n")
    with RunningServer(ScriptedEngine(), api_key_file=str(file)) as server:
        assert httpx.get(server.url + "/metrics", headers=bearer("red-key-1234")).status_code == 200


def test_refusals_are_counted_by_reason_and_by_names_of_the_file_alone(server):
    ask(server, COMPLETE, PROMPT, bearer("nobodys-key-" + "x" * 50))
    ask(server, COMPLETE, {**PROMPT, "max_tokens": 51}, bearer("red-key-1234"))
    for _ in range(4):
        ask(server, COMPLETE, PROMPT, bearer("red-key-1234"))
    ask(server, COMPLETE, {"prompt": ""}, bearer("blue-key-1234"))
    httpx.get(server.url + "/nothing", headers=bearer("blue-key-1234"))
    assert samples(server, "quire:requests_refused_total") == {
        '{reason="unauthorized",tenant=""}': 1, '{reason="max_tokens",tenant="red"}': 1,
        '{reason="requests_per_minute",tenant="red"}': 1, '{reason="bad_request",tenant="blue"}': 1,
        '{reason="not_found",tenant="blue"}': 1,
    }  # fmt: skip


def test_a_stream_says_the_limits_too(server):
    answer = ask(server, CHAT, {**HELLO, "max_tokens": 4, "stream": True}, bearer("red-key-1234"))
    assert answer.headers["x-ratelimit-remaining-requests"] == "2" and events(answer)
    assert "x-ratelimit-limit-requests" not in ask(server, CHAT, HELLO, bearer("operator-key-1")).headers


def test_the_key_file_is_read_again_while_the_server_runs(file, monkeypatch):
    monkeypatch.setattr(key_watch.KeyWatch.run, "__defaults__", (0.01,))
    with RunningServer(ScriptedEngine(), api_key_file=str(file), max_num_queued_reqs=8) as server:
        assert ask(server, COMPLETE, PROMPT, bearer("red-key-1234")).status_code == 200
        other = file.with_name("other")
        other.write_text(FILE.replace("red-key-1234", "new-key-1234"))
        os.replace(other, file)
        server.wait_until(lambda: server.state.tenants.of(b"Bearer new-key-1234") is not None)
        assert ask(server, COMPLETE, PROMPT, bearer("red-key-1234")).status_code == 401
        answer = ask(server, COMPLETE, PROMPT, bearer("new-key-1234"))
        assert answer.headers["x-ratelimit-remaining-requests"] == "1"
