"""What goes over the wire: bytes, headers, status codes; broken and hostile requests."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from typing import Any

import httpx
import pytest

from tests.server.engines import ScriptedEngine
from tests.server.servers import RunningServer

CHAT = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3}


def post(server: RunningServer, path: str, body: Any, **options: Any) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"content-type": "application/json", **options.pop("headers", {})}
    options = {"timeout": 20, "verify": False, **options}  # certificates are long to load, and of no use on plain HTTP
    return httpx.post(server.url + path, content=content, headers=headers, **options)


def error_of(answer: httpx.Response) -> dict[str, Any]:
    content = answer.json()
    assert set(content) == {"error"} and set(content["error"]) == {"message", "type", "param", "code"}
    assert content["error"]["code"] in (answer.status_code, "context_length_exceeded")
    return content["error"]


def events(answer: httpx.Response) -> list[Any]:
    blocks = answer.text.split("\n\n")
    assert blocks[-1] == "" and all(block.startswith("data: ") for block in blocks[:-1])
    assert blocks[-2] == "data: [DONE]"
    return [json.loads(block.removeprefix("data: ")) for block in blocks[:-2]]


def test_a_stream_is_sse_whose_events_share_their_head(server):
    answer = post(server, CHAT, {**HELLO, "stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["cache-control"] == "no-cache"
    heads = {(one["id"], one["created"], one["model"], one["system_fingerprint"]) for one in events(answer)}
    assert len(heads) == 1


def test_the_clients_request_id_comes_back_and_names_the_answer(server):
    answer = post(server, CHAT, HELLO, headers={"x-request-id": "job-7.a"})
    assert answer.headers["x-request-id"] == "job-7.a" and answer.json()["id"] == "chatcmpl-job-7.a"
    twice = [post(server, CHAT, HELLO, headers={"x-request-id": "same"}).status_code for _ in range(2)]
    assert twice == [200, 200]


def test_an_answer_that_cannot_be_as_long_as_was_asked_says_so(server):
    for path, body in ((CHAT, HELLO), ("/v1/completions", {"prompt": "hello"})):
        assert "warnings" not in post(server, path, {**body, "max_tokens": 5}).json()
        (warning,) = post(server, path, {**body, "max_tokens": 10**6}).json()["warnings"]
        assert re.fullmatch(r"1000000 tokens were requested, but max_model_len leaves \d+ after this prompt", warning)


def test_a_request_id_that_could_forge_log_lines_is_replaced_and_named(server):
    answer = post(server, CHAT, HELLO, headers={"x-request-id": "a b{}"})
    assert re.fullmatch(r"[0-9a-f]{32}", answer.headers["x-request-id"])
    assert "a b" not in answer.json()["id"]
    (warning,) = answer.json()["warnings"]
    assert "X-Request-Id is ignored" in warning


def test_requests_under_the_same_id_at_once_do_not_meet(server):
    async def ask(client: httpx.AsyncClient) -> int:
        return (await client.post(server.url + CHAT, json={**HELLO, "request_id": "twin"})).status_code

    async def both() -> list[int]:
        async with httpx.AsyncClient() as client:
            return await asyncio.gather(ask(client), ask(client))

    assert asyncio.run(both()) == [200, 200]


BROKEN = {
    "nothing": (b"", 400),
    "not json": (b"{", 400),
    "a list": (b"[]", 400),
    "a number": (b"17", 400),
    "broken utf-8": (b'{"messages": "\xff\xfe"}', 400),
    "half a surrogate pair": (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', 400),
    "deep lists": (b'{"messages": ' + b"[" * 20_000 + b"]" * 20_000 + b"}", 400),
    "deep objects": (b'{"a":' * 300 + b"1" + b"}" * 300, 400),
    "deep brackets in a text": (json.dumps({**HELLO, "user": "[" * 500}).encode(), 200),
    "a huge integer": (json.dumps({**HELLO, "max_tokens": 10**300}).encode(), 400),
    "a huger integer": (b'{"max_tokens": 1' + b"0" * 6000 + b"}", 400),
    "a float for a count": (json.dumps({**HELLO, "max_tokens": 1e30}).encode(), 400),
    "a float too large": (b'{"messages": [{"role": "user", "content": "x"}], "temperature": 1e400}', 400),
    "not a number": (b'{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}', 400),
    "no messages": (b"{}", 400),
    "messages of the wrong type": (json.dumps({"messages": "hello"}).encode(), 400),
    "an empty role": (json.dumps({"messages": [{"role": "", "content": "x"}]}).encode(), 400),
    "an image": (
        json.dumps({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}).encode(),
        400,
    ),
    "an unknown stream option": (json.dumps({**HELLO, "stream": True, "stream_options": {"x": 1}}).encode(), 400),
    "stream options without a stream": (json.dumps({**HELLO, "stream_options": {}}).encode(), 400),
    "an empty list of tools": (json.dumps({**HELLO, "tools": []}).encode(), 400),
    "template variables that are reserved": (
        json.dumps({**HELLO, "chat_template_kwargs": {"messages": []}}).encode(), 400,
    ),
    "a template of its own": (json.dumps({**HELLO, "chat_template": "{{ messages }}"}).encode(), 400),
    "a cache salt with a slash": (json.dumps({**HELLO, "cache_salt": "a/b"}).encode(), 400),
    "text with a nul": (json.dumps({"messages": [{"role": "user", "content": "a\0b"}], "max_tokens": 1}).encode(), 200),
}  # fmt: skip


@pytest.mark.parametrize(("body", "status"), BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_body_is_answered_in_the_form_of_an_error(server, body, status):
    answer = post(server, CHAT, body)
    assert answer.status_code == status
    if status != 200:
        error = error_of(answer)
        assert error["type"] == "BadRequestError" and len(error["message"]) < 1100


INTEGER_FIELDS = (
    "n", "max_tokens", "min_tokens", "top_k", "seed", "logprobs", "prompt_logprobs", "truncate_prompt_tokens",
    "priority", "temperature", "top_p", "presence_penalty",
)  # fmt: skip


@pytest.mark.parametrize("field", INTEGER_FIELDS)
def test_cve_2026_34756_extreme_numbers_are_answered_at_once(server, field):
    for number in (0, -1, 2**31, 2**63, 10**30, 1e30):
        body = {"prompt": [5, 6], "max_tokens": 2, field: number}
        answer = post(server, "/v1/completions", body)
        assert answer.status_code in (200, 400), answer.text
        if answer.status_code == 400:
            assert error_of(answer)["param"] == field


@pytest.mark.parametrize("field", ["prompt", "stop_token_ids", "allowed_token_ids", "logit_bias"])
def test_vllm_54195_ids_out_of_the_vocabulary_are_refused(server, field):
    for token_id in (-1, 3072, 2**31, 2**63):
        value: Any = {str(token_id): 1.0} if field == "logit_bias" else [token_id]
        answer = post(server, "/v1/completions", {"prompt": [5], "max_tokens": 1, field: value})
        assert answer.status_code == 400 and error_of(answer)["param"], answer.text


def test_cve_2025_48956_a_huge_head_is_refused(server):
    answer = httpx.get(server.url + "/v1/models", headers={"x-filler": "a" * 40_000})
    assert answer.status_code in (400, 431)
    many = {f"x-{number}": "a" * 900 for number in range(40)}
    assert httpx.get(server.url + "/v1/models", headers=many).status_code in (400, 431)


def test_cve_2026_22778_errors_say_nothing_of_the_inside(server):
    server.engine.fails_after = 1
    try:
        whole, streamed = post(server, CHAT, HELLO), post(server, CHAT, {**HELLO, "stream": True})
    finally:
        server.engine.fails_after = None
    assert whole.status_code == 500 and error_of(whole)["type"] == "InternalServerError"
    assert streamed.status_code == 200 and events(streamed)[-1]["error"]["code"] == 500
    for text in (whole.text, streamed.text):
        assert "division" not in text and "/usr" not in text and "0x" not in text


def test_a_failure_before_the_first_token_of_a_stream_is_a_status(server):
    server.engine.fails_after = 0
    try:
        answer = post(server, CHAT, {**HELLO, "stream": True})
    finally:
        server.engine.fails_after = None
    assert answer.status_code == 500 and error_of(answer)


def test_a_body_must_say_that_it_is_json(server):
    answer = httpx.post(server.url + CHAT, content=json.dumps(HELLO), headers={"content-type": "text/plain"})
    assert answer.status_code == 400 and "application/json" in error_of(answer)["message"]


def test_unknown_paths_and_methods_are_errors_of_the_api(server):
    assert error_of(httpx.get(server.url + "/v2/nothing"))["type"] == "NotFoundError"
    for path, methods in ((CHAT, "POST"), ("/v1/responses/x", "DELETE, GET, HEAD")):
        wrong = httpx.put(server.url + path)
        assert error_of(wrong)["code"] == 405 and wrong.headers["allow"] == methods
        assert error_of(wrong)["message"] == f"method PUT is not allowed here (use {methods})"


def test_token_ids_and_prompt_come_back_when_asked(server):
    body = {**HELLO, "return_token_ids": True, "return_prompt_text": True}
    whole = post(server, CHAT, body).json()
    assert whole["prompt_token_ids"] == server.engine.prompts[-1]
    assert whole["prompt_text"].startswith("<|im_start|>")
    assert len(whole["choices"][0]["token_ids"]) == 3
    chunks = events(post(server, CHAT, {**body, "stream": True}))
    assert chunks[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    assert [i for one in chunks for i in one["choices"][0].get("token_ids", [])] == whole["choices"][0]["token_ids"]


def test_tokens_can_be_written_as_ids(server):
    body = {"prompt": [5], "max_tokens": 2, "logprobs": 0, "return_tokens_as_token_ids": True}
    tokens = post(server, "/v1/completions", body).json()["choices"][0]["logprobs"]["tokens"]
    assert all(re.fullmatch(r"token_id:\d+", token) for token in tokens)


def test_prompt_logprobs_have_an_entry_for_each_prompt_token(server):
    answer = post(server, "/v1/completions", {"prompt": [5, 6, 7], "max_tokens": 1, "prompt_logprobs": 1}).json()
    lines = answer["choices"][0]["prompt_logprobs"]
    assert lines[0] is None and set(lines[1]["6"]) == {"logprob", "rank", "decoded_token"}
    refused = post(server, "/v1/completions", {"prompt": [5], "prompt_logprobs": 1, "stream": True})
    assert error_of(refused)["param"] == "prompt_logprobs"


@pytest.mark.parametrize(("side", "kept"), [("left", [8, 9]), ("right", [5, 6])])
def test_a_prompt_is_cut_only_when_asked(server, side, kept):
    cut = {"truncate_prompt_tokens": 2, "truncation_side": side}
    post(server, "/v1/completions", {"prompt": [5, 6, 7, 8, 9], "max_tokens": 1, **cut})
    assert server.engine.prompts[-1] == kept
    long = {"prompt": [5] * 3000, "max_tokens": 1}
    assert post(server, "/v1/completions", long).status_code == 400
    assert post(server, "/v1/completions", {**long, "truncate_prompt_tokens": -1}).status_code == 200


def test_a_message_can_be_continued_and_echoed(server):
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well, "}]
    body = {"messages": messages, "continue_final_message": True, "echo": True, "max_tokens": 2}
    answer = post(server, CHAT, body).json()
    assert answer["choices"][0]["message"]["content"].startswith("Well, ")
    assert server.engine.tokenizer.decode(server.engine.prompts[-1], False).endswith("Well, ")
    assert "warnings" not in answer
    assert "echo has no effect" in post(server, CHAT, {**HELLO, "echo": True}).json()["warnings"][0]
    both = {**body, "add_generation_prompt": True}
    assert post(server, CHAT, both).status_code == 400


def test_fields_that_clients_copy_from_answers_into_messages_are_taken(server):
    message = post(server, CHAT, HELLO).json()["choices"][0]["message"]
    message |= {"refusal": None, "annotations": [], "audio": None, "function_call": None, "tool_calls": []}
    again = {**HELLO, "messages": [*HELLO["messages"], message, {"role": "user", "content": "And?"}]}
    assert post(server, CHAT, again).status_code == 200


def test_tokenize_and_detokenize_are_inverse(server):
    tokens = post(server, "/tokenize", {"prompt": "Hello there", "return_token_strs": True}).json()
    assert tokens["count"] == len(tokens["tokens"]) == len(tokens["token_strs"])
    assert tokens["max_model_len"] == 2048
    assert post(server, "/detokenize", {"tokens": tokens["tokens"]}).json() == {"prompt": "Hello there"}
    chat = post(server, "/tokenize", {"messages": HELLO["messages"]}).json()["tokens"]
    post(server, CHAT, HELLO)
    assert server.engine.prompts[-1] == chat
    assert post(server, "/detokenize", {"tokens": [-1]}).status_code == 400


@pytest.mark.parametrize("path", ["/tokenize", "/invocations"])
def test_a_request_with_a_prompt_and_messages_is_refused_as_one_would_be_ignored(server, path):
    answer = post(server, path, {"prompt": "Hi", "messages": HELLO["messages"]})
    assert answer.status_code == 400 and error_of(answer)["param"] == "messages"
    assert "prompt and messages are both given" in error_of(answer)["message"]
    assert post(server, path, {"prompt": None, "messages": HELLO["messages"]}).status_code == 200
    assert post(server, path, {"prompt": "Hi", "messages": None}).status_code == 200


def test_tokenizing_truncates_as_a_request_does_and_names_what_it_does_not_use(server):
    whole = post(server, "/tokenize", {"prompt": "one two three"}).json()
    cut = post(server, "/tokenize", {"prompt": "one two three", "truncate_prompt_tokens": 2}).json()
    assert cut["tokens"] == whole["tokens"][-2:] and cut["count"] == 2 and "warnings" not in whole
    assert error_of(post(server, "/tokenize", {"prompt": "a", "truncation_side": "up"}))["param"] == "truncation_side"
    unused = post(server, "/tokenize", {"prompt": "a", "chat_template_kwargs": {"a": 1}, "tools": []}).json()
    assert unused["warnings"] == ["chat_template_kwargs has no effect on prompt"]
    assert "token" in post(server, "/detokenize", {"tokens": [5], "token": 6}).json()["warnings"][0]
    assert error_of(post(server, "/detokenize", {"model": "leaf"}))["param"] == "tokens"


IGNORED = [
    (CHAT, {"response_format": {"type": "json_object", "schema": {"type": "object"}}}, "response_format"),
    (CHAT, {"response_format": {"type": "text", "json_schema": {"name": "a", "schema": {}}}}, "response_format"),
    (CHAT, {"logit_bias": {"5": 1, "05": 2}}, "logit_bias"),
    (CHAT, {"logit_bias": {"1" * 5000: 1}}, "logit_bias"),
    (CHAT, {"tools": [{"type": "function", "function": {"name": "f", "strict": "no"}}]}, "tools"),
    (CHAT, {"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]}, "tools"),
    (CHAT, {"tools": [{"type": "function", "function": {"name": "f", "description": 7}}]}, "tools"),
    ("/v1/responses", {"text": {"format": {}}}, "text"),
    ("/v1/responses", {"logit_bias": {"1" * 5000: 1}}, "logit_bias"),
    ("/v1/responses/input_tokens", {"truncation": "some"}, "truncation"),
    ("/v1/responses/input_tokens", {"truncate_prompt_tokens": -3}, "truncate_prompt_tokens"),
]


@pytest.mark.parametrize(
    ("path", "fields", "field"), IGNORED, ids=[f"{path}-{number}" for number, (path, *_) in enumerate(IGNORED)]
)
def test_a_value_that_would_be_ignored_or_fail_is_refused_by_its_field(server, path, fields, field):
    answer = post(server, path, {**(HELLO if path == CHAT else {"input": "Hello"}), **fields})
    assert answer.status_code == 400 and error_of(answer)["param"] == field, answer.text


def test_a_limit_that_another_one_overrules_is_named(server):
    assert "warnings" not in post(server, CHAT, {**HELLO, "max_completion_tokens": 3}).json()
    warned = post(server, CHAT, {**HELLO, "max_completion_tokens": 2}).json()
    assert warned["warnings"] == ["max_tokens has no effect: max_completion_tokens is given"]
    assert warned["usage"]["completion_tokens"] == 2


def test_unknown_fields_within_fields_are_named(server):
    body = {"input": "one two three", "reasoning": {"mode": "x"}, "x": 1, "truncate_prompt_tokens": 2}
    counted = post(server, "/v1/responses/input_tokens", body).json()
    assert counted["input_tokens"] == 2
    assert counted["warnings"] == ["unknown field 'x' is ignored", "unknown field 'mode' of reasoning is ignored"]


def test_half_of_a_surrogate_pair_is_called_that(server):
    answer = post(server, CHAT, b'{"messages": [{"role": "user", "content": "\\ud800"}]}')
    assert answer.status_code == 400 and "half of a surrogate pair" in error_of(answer)["message"]


def test_a_half_sent_request_does_not_hold_up_others(server):
    with socket.create_connection(("127.0.0.1", server.port)) as half:
        half.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 500\r\n"
                     b"content-type: application/json\r\n\r\n{")  # fmt: skip
        assert post(server, CHAT, HELLO).status_code == 200
    server.wait_until(lambda: not server.engine.live)


def test_a_client_that_vanishes_while_it_waits_leaves_nothing_behind(server):
    server.engine.holds = True
    body = json.dumps({**HELLO, "stream": True}).encode()
    lines = f"host: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    head = f"POST {CHAT} HTTP/1.1\r\n{lines}\r\n\r\n"
    try:
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall(head.encode() + body)
            server.wait_until(lambda: server.engine.live)
        server.wait_until(lambda: not server.engine.live)
    finally:
        server.engine.holds = False
    assert server.state.admission.num_answers == 0


def test_a_silent_stream_gets_comments_and_then_its_answer():
    with RunningServer(ScriptedEngine(holds=True), sse_keep_alive_interval=1) as server:
        with httpx.stream("POST", server.url + CHAT, json={**HELLO, "stream": True}, timeout=60) as answer:
            parts = answer.iter_text()
            assert next(parts) == ": keep-alive\n\n"
            server.engine.holds = False
            rest = "".join(parts).replace(": keep-alive\n\n", "")
        assert len(events(httpx.Response(200, text=rest))) == 4


def test_openapi_describes_every_route(server):
    schema = httpx.get(server.url + "/openapi.json").json()
    assert {"/v1/completions", CHAT, "/tokenize", "/metrics"} <= set(schema["paths"])
    body = schema["paths"][CHAT]["post"]["requestBody"]["content"]["application/json"]["schema"]
    named = schema["components"]["schemas"]
    assert {"messages", "temperature", "stream_options"} <= set(named[body["$ref"].split("/")[-1]]["properties"])
    assert set(re.findall(r"#/components/schemas/(\w+)", json.dumps(schema))) <= set(named)
