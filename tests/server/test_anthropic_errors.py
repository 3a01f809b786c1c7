"""What /v1/messages says when something is wrong, wherever it is found: Anthropic's form, its client's exceptions."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest

from tests.server.anthropic_clients import ASKED, HELLO, ask, client
from tests.server.engines import ScriptedEngine, WritingEngine
from tests.server.servers import RunningServer
from tests.server.test_protocol import post

MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
PLAIN = {"model": "leaf", "max_tokens": 3, "messages": HELLO}
KEY = "correct-horse-battery"
CALL = {"type": "tool_use", "id": "1", "name": "f", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "document"}]}


def turn(role: str, *blocks: Any) -> dict[str, Any]:
    return {"role": role, "content": list(blocks)}


@pytest.fixture(scope="module")
def writer() -> Iterator[RunningServer]:
    with RunningServer(WritingEngine(), max_body_bytes=1 << 16) as running:
        yield running


def error_of(answer: httpx.Response) -> tuple[int, str]:
    """(status, type) of an error, whose form is checked."""
    content = answer.json()
    assert set(content) == {"type", "error", "request_id"} and content["type"] == "error"
    assert set(content["error"]) == {"type", "message"}
    assert content["request_id"] == answer.headers["request-id"] == answer.headers["x-request-id"]
    return answer.status_code, content["error"]["type"]


@pytest.mark.parametrize(
    ("body", "options", "error"),
    [
        (b"{", {}, (400, "invalid_request_error")),
        (b"[]", {}, (400, "invalid_request_error")),
        ({**PLAIN, "model": "other"}, {}, (404, "not_found_error")),
        ({**PLAIN, "messages": "hot"}, {}, (400, "invalid_request_error")),
        ({**PLAIN, "system": "x" * (1 << 17)}, {}, (413, "request_too_large")),
        (PLAIN, {"headers": {"content-type": "text/plain"}}, (400, "invalid_request_error")),
        (PLAIN, {"headers": {"x-filler": "x" * 40000}}, (431, "invalid_request_error")),
    ],
    ids=["no json", "a list", "model", "type", "too large", "content type", "head"],
)
def test_a_refusal_has_anthropics_form(writer, body, options, error):
    for path in (MESSAGES, COUNT):
        assert error_of(post(writer, path, body, **options)) == error


def test_what_is_not_there_below_the_path_has_that_form_too_and_beside_it_has_not(writer):
    assert error_of(post(writer, MESSAGES + "/batches", PLAIN)) == (404, "not_found_error")
    assert error_of(httpx.get(writer.url + MESSAGES)) == (405, "invalid_request_error")
    other = post(writer, "/v1/messagesx", PLAIN)
    assert set(other.json()["error"]) == {"message", "type", "param", "code"} and "request-id" not in other.headers


def test_a_key_may_come_in_either_header():
    with RunningServer(ScriptedEngine(), api_key=KEY) as server:
        for headers in ({"authorization": f"Bearer {KEY}"}, {"x-api-key": KEY}):
            assert post(server, MESSAGES, PLAIN, headers=headers).status_code == 200
        wrong = (
            {},
            {"x-api-key": ""},
            {"x-api-key": KEY + "x"},
            {"x-api-key": KEY, "authorization": "Bearer wrong-key"},
        )
        for headers in wrong:
            assert error_of(post(server, MESSAGES, PLAIN, headers=headers)) == (401, "authentication_error")
        with client(server, api_key="wrong-key") as own, pytest.raises(anthropic.AuthenticationError):
            own.messages.create(**PLAIN)
        with client(server, api_key=KEY) as own:
            assert own.messages.create(**PLAIN).usage.output_tokens == 3


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no limit": ({"max_tokens": anthropic.omit}, "max_tokens"),
    "no tokens": ({"max_tokens": 0}, "max_tokens"),
    "no messages": ({"messages": []}, "messages"),
    "role": ({"messages": [{"role": "tool", "content": "x"}]}, r"messages\[0\]"),
    "no content": ({"messages": [{"role": "user"}]}, r"messages\[0\].content"),
    "image": (
        {"messages": [turn("user", {"type": "image", "source": {}})]},
        r"messages\[0\].content\[0\] is a block of type image",
    ),
    "document in a result": (
        {"messages": [turn("user", RESULT)]},
        r"messages\[0\].content\[0\].content\[0\] is a block of type document",
    ),
    "call of a user": ({"messages": [turn("user", CALL)]}, "tool_use"),
    "block without text": ({"messages": [turn("user", {"type": "text"})]}, "text"),
    "input that is not a JSON object": (
        {"messages": [*HELLO, turn("assistant", {**CALL, "input": 5})]},
        r"messages\[1\].content\[0\].input",
    ),
    "call without a result": ({"messages": [*HELLO, turn("assistant", CALL)]}, "tool_result"),
    "nothing to continue": ({"messages": [*HELLO, {"role": "assistant", "content": ""}]}, "continued"),
    "server tool": ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, r"tools\[0\] is of type"),
    "two tools of one name": ({"tools": [{"name": "f", "input_schema": {}}] * 2}, r"tools\[1\].name is that of"),
    "tool without schema": ({"tools": [{"name": "f"}]}, r"tools\[0\].*input_schema"),
    "choice of a tool that is not there": ({"tool_choice": {"type": "tool", "name": "gte_weather"}}, "get_weather"),
    "choice without tools": ({"tools": [], "tool_choice": {"type": "any"}}, "no tools"),
    "unknown choice": ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
    "small budget": ({"thinking": {"type": "enabled", "budget_tokens": 100}, "max_tokens": 2000}, "budget_tokens"),
    "large budget": ({"thinking": {"type": "enabled", "budget_tokens": 2000}, "max_tokens": 2000}, "less than"),
    "no budget": ({"thinking": {"type": "enabled"}}, "budget_tokens"),
    "unknown thinking": ({"thinking": {"type": "between_tools"}}, "thinking.type"),
    "many stops": ({"stop_sequences": ["a"] * 65}, "stop_sequences has 65"),
    "unknown format": ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
    "two formats": (
        {
            "output_config": {"format": {"type": "json_schema", "schema": {}}},
            "extra_body": {"output_format": {"type": "json_schema", "schema": {}}},
        },
        "output_config.format",
    ),
    "container": ({"extra_body": {"container": "c"}}, "container"),
    "mcp servers": ({"extra_body": {"mcp_servers": [{"url": "x"}]}}, "mcp_servers"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_done_is_refused_by_name(writer, name):
    fields, words = REFUSED[name]
    body = {**ASKED, **fields, **fields.get("extra_body", {})}
    body = {name: value for name, value in body.items() if value is not anthropic.omit and name != "extra_body"}
    answer = post(writer, MESSAGES, body)
    assert error_of(answer) == (400, "invalid_request_error")
    assert re.search(words, answer.json()["error"]["message"])


def test_what_is_not_used_is_named_and_strict_servers_refuse_it(writer):
    cached = [{"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}, "colour": "red"}]
    fields: dict[str, Any] = {
        "messages": [{"role": "user", "content": cached}],
        "metadata": {"user_id": "u"},
        "service_tier": "auto",
        "extra_body": {"temprature": 1, "context_management": {"edits": []}},
    }
    warnings = ask(writer, "Hello.", **fields).warnings
    for words in ("cache_control", "colour", "metadata", "service_tier", "temprature", "context_management"):
        assert sum(words in one for one in warnings) == 1, warnings
    with client(writer) as own, own.messages.stream(**{**ASKED, **fields}) as stream:
        assert stream.get_final_message().warnings == warnings  # type: ignore[attr-defined]
    assert not hasattr(ask(writer, "Hello."), "warnings")
    with RunningServer(WritingEngine(), strict_requests=True) as strict:
        with pytest.raises(anthropic.BadRequestError, match="cache_control"):
            ask(strict, "Hello.", messages=fields["messages"])
        with pytest.raises(anthropic.BadRequestError, match="metadata"):
            ask(strict, "Hello.", metadata={"user_id": "u"})


def test_thinking_that_nothing_reads_is_said_to_have_no_effect(writer):
    message = ask(writer, "Hello.", thinking={"type": "enabled", "budget_tokens": 1024}, max_tokens=1500)
    assert any("--reasoning-parser" in one for one in message.warnings)
    assert any("budget_tokens has no effect" in one for one in message.warnings)


def test_the_clients_exceptions_are_those_of_the_error(writer):
    with client(writer) as own:
        with pytest.raises(anthropic.NotFoundError, match="leaf") as missing:
            own.messages.create(**{**PLAIN, "model": "claude"})
        assert missing.value.type == "not_found_error" and missing.value.request_id
        with pytest.raises(anthropic.BadRequestError):
            own.messages.create(**{**PLAIN, "max_tokens": -1})
        with pytest.raises(anthropic.NotFoundError):
            own.messages.count_tokens(model="claude", messages=HELLO)
        with pytest.raises(anthropic.APIStatusError) as large:
            own.messages.create(**{**PLAIN, "system": "x" * (1 << 17)})
        assert large.value.status_code == 413


def test_too_much_waiting_and_an_end_that_is_near_say_when_to_come_again():
    with RunningServer(ScriptedEngine(holds=True), max_num_queued_reqs=0) as server:
        server.state.admission._max_num_seqs = 1
        first = threading.Thread(target=post, args=(server, MESSAGES, PLAIN))
        first.start()
        server.wait_until(lambda: server.engine.live)
        refused = post(server, MESSAGES, PLAIN)
        assert error_of(refused) == (429, "rate_limit_error") and int(refused.headers["retry-after"]) >= 1
        server.state.admission.is_draining = True
        ending = post(server, MESSAGES, PLAIN)
        assert error_of(ending) == (503, "overloaded_error") and ending.headers["retry-after"] == "1"
        server.state.admission.is_draining = server.engine.holds = False
        first.join(60)


@pytest.mark.parametrize("fails", ["fails_after", "dies_after"])
def test_an_error_inside_a_stream_is_an_event(fails):
    with RunningServer(ScriptedEngine(**{fails: 2})) as server:
        answer = post(server, MESSAGES, {**PLAIN, "max_tokens": 9, "stream": True})
        assert answer.status_code == 200
        name, data = answer.text.rstrip("\n").rsplit("\n\n", 1)[-1].split("\n")
        assert name == "event: error" and "secret" not in data and "/usr" not in data
        error = json.loads(data.removeprefix("data: "))
        assert error["type"] == "error" and error["request_id"] == answer.headers["request-id"]
        assert error["error"]["type"] == ("api_error" if fails == "fails_after" else "overloaded_error")
        with client(server) as own, pytest.raises(anthropic.APIStatusError):
            own.messages.create(**PLAIN)


def test_an_answer_that_is_cut_from_outside_is_an_error_and_no_message():
    with RunningServer(ScriptedEngine(holds=True)) as server:
        answers: list[httpx.Response] = []
        threads = [
            threading.Thread(target=lambda body: answers.append(post(server, MESSAGES, body)), args=(body,))
            for body in (PLAIN, {**PLAIN, "stream": True})
        ]
        for thread in threads:
            thread.start()
        server.wait_until(lambda: len(server.engine.live) == 2)
        server.engine.aborted += list(server.engine.live)
        for thread in threads:
            thread.join(60)
        assert all("overloaded_error" in answer.text for answer in answers) and len(answers) == 2


def foxes(count: int) -> list[Any]:
    return [{"role": "user", "content": "fox " * count}]


def test_a_prompt_without_room_is_refused_in_the_words_that_agents_know_and_a_full_model_says_so(writer):
    long = {**PLAIN, "messages": [{"role": "user", "content": "The quick brown fox. " * 800}]}
    with (
        client(writer) as own,
        pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > 2047"),
    ):
        own.messages.create(**long)
    with client(writer) as own:
        sizes = [own.messages.count_tokens(model="leaf", messages=foxes(count)).input_tokens for count in (100, 200)]
        per_hundred = sizes[1] - sizes[0]
    nearly = foxes(200 + 100 * (2040 - sizes[1]) // per_hundred)
    message = ask(writer, "word " * 100, tools=anthropic.omit, messages=nearly, max_tokens=4000)
    assert message.stop_reason == "model_context_window_exceeded" and message.usage.output_tokens < 100
