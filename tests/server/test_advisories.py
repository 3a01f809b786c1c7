"""Attacks that other servers fell to, tried over HTTP. docs/reference/advisories.md says which is which.

Others carry their names where they belong: tests/server/test_protocol.py, tests/server/test_safety.py,
tests/server/test_connection_limits.py.
"""

from __future__ import annotations

import base64
import itertools
import json
import re
import socket
import threading

import httpx
import pytest

from quire.config.server import LimitsConfig
from quire.server.http.access import ROUTE_ACCESS, Access
from tests.server.engines import ScriptedEngine
from tests.server.servers import RunningServer
from tests.server.test_protocol import CHAT, HELLO, error_of, post
from tests.server.test_safety import bearer

COMPLETIONS = "/v1/completions"


@pytest.fixture
def untouched(server):
    """The server, whose engine must not be given anything."""
    before = len(server.engine.prompts)
    yield server
    assert len(server.engine.prompts) == before


def chat_with(part: object) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": [{"type": "text", "text": "What is it?"}, part]}], "max_tokens": 1}


MEDIA_URLS = {
    "the loopback": "http://127.0.0.1:{port}/x.png",
    "the loopback in one number": "http://2130706433:{port}/x.png",
    "the loopback of IPv6": "http://[::1]:{port}/x.png",
    "a name of it": "http://localhost:{port}/x.png",
    "credentials before it": "http://example.com@127.0.0.1:{port}/x.png",
    "a file": "file:///etc/passwd",
    "the metadata service": "http://169.254.169.254/latest/meta-data/",
}
MEDIA_PARTS = ("image_url", "audio_url", "video_url")


@pytest.mark.parametrize("url", MEDIA_URLS.values(), ids=MEDIA_URLS.keys())
def test_cve_2025_6242_and_cve_2026_33626_no_address_in_a_request_is_fetched(untouched, url):
    with socket.create_server(("127.0.0.1", 0)) as inside:
        inside.settimeout(0.05)
        for kind in MEDIA_PARTS:
            part = {"type": kind, kind: {"url": url.format(port=inside.getsockname()[1])}}
            answer = post(untouched, CHAT, chat_with(part))
            assert answer.status_code == 400 and "not supported" in error_of(answer)["message"]
        with pytest.raises(TimeoutError):
            inside.accept()


def test_cve_2026_22773_and_cve_2026_22778_media_is_refused_before_it_is_decoded(untouched):
    bombs = {
        "image_url": {"url": "data:image/png;base64," + base64.b64encode(b"\x89PNG\r\n\x1a\n" + b"\xff" * 99).decode()},
        "input_audio": {"data": base64.b64encode(b"OggS" + b"\0" * 99).decode(), "format": "opus"},
        "video_url": {"url": "data:video/jpeg;base64,////"},
    }
    for kind, content in bombs.items():
        answer = post(untouched, CHAT, chat_with({"type": kind, kind: content}))
        assert answer.status_code == 400 and kind in error_of(answer)["message"]
        assert not re.search(r"0x[0-9a-f]{6}|PNG|Traceback", answer.text)


INTEGERS = (
    "n", "max_tokens", "max_completion_tokens", "min_tokens", "top_k", "seed", "logprobs", "top_logprobs",
    "prompt_logprobs", "truncate_prompt_tokens", "priority", "best_of", "thinking_token_budget",
)  # fmt: skip


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_cve_2026_34756_no_integer_makes_the_engine_work_without_end(server, path):
    base = {"prompt": [5], "max_tokens": 1} if path == COMPLETIONS else {**HELLO, "max_tokens": 1}
    most = LimitsConfig().max_answers
    for name, number in itertools.product(INTEGERS, (-(2**63), -1, most + 1, 16385, 2**31, 2**63, 2**64, 10**30)):
        before = len(server.engine.prompts)
        answer = post(server, path, {**base, name: number})
        assert answer.status_code in (200, 400), answer.text
        taken = len(server.engine.prompts) - before
        assert taken == (answer.status_code == 200)
        if name == "n":
            assert answer.status_code == 400 and error_of(answer)["param"] == "n"
    assert post(server, COMPLETIONS, {"prompt": ["a"] * 33, "n": 32}).status_code == 400, "prompts times n counts"


def test_cve_2025_62164_no_tensor_is_read_from_a_request(untouched):
    embeds = base64.b64encode(b"PK\x03\x04" + b"\0" * 50).decode()
    answer = post(untouched, COMPLETIONS, {"prompt_embeds": embeds, "max_tokens": 1})
    assert answer.status_code == 400 and error_of(answer)["param"] == "prompt_embeds"
    for field in ("image_embeds", "audio_embeds"):
        assert post(untouched, CHAT, chat_with({"type": field, field: embeds})).status_code == 400
    for field in ("kv_transfer_params", "mm_payload"):
        answer = post(untouched, CHAT, {**HELLO, field: {"data": embeds}})
        assert answer.status_code == 400 and error_of(answer)["param"] == field


RESERVED = ("messages", "tools", "documents", "add_generation_prompt")
UNUSED = (
    {"tokenize": True}, {"return_dict": True}, {"truncation": True, "max_length": 1}, {"continue_final_message": True},
    {"raise_exception": 1, "range": 1, "namespace": 1},
)  # fmt: skip


def test_cve_2025_62426_template_variables_change_nothing_but_the_template(server):
    post(server, CHAT, HELLO)
    plain = server.engine.prompts[-1]
    for kwargs in UNUSED:
        answer = post(server, CHAT, {**HELLO, "chat_template_kwargs": kwargs})
        assert answer.status_code == 200, answer.text
        assert server.engine.prompts.pop() == plain
    for name in RESERVED:
        answer = post(server, CHAT, {**HELLO, "chat_template_kwargs": {name: []}})
        assert answer.status_code == 400, name


def test_cve_2025_62426_a_slow_template_does_not_hold_up_the_server(monkeypatch):
    engine, goes_on, is_rendering = ScriptedEngine(), threading.Event(), threading.Event()
    render = engine.chat_template.render

    def slow(*arguments, **options):
        is_rendering.set()
        goes_on.wait(60)
        return render(*arguments, **options)

    monkeypatch.setattr(engine.chat_template, "render", slow, raising=False)
    with RunningServer(engine) as server:
        long = {**HELLO, "messages": [{"role": "user", "content": "word " * 300}]}
        asked = threading.Thread(target=post, args=(server, CHAT, long))
        asked.start()
        assert is_rendering.wait(60)
        try:
            assert httpx.get(server.url + "/live").status_code == 200
            assert post(server, COMPLETIONS, {"prompt": "a", "max_tokens": 1}).status_code == 200
        finally:
            goes_on.set()
            asked.join()


BAD_SCHEMAS = (
    {"type": "string", "pattern": "(((("}, {"type": "string", "pattern": "(a+)+$" * 50}, {"type": "nothing"},
    {"type": 7},
    {"pattern": 5}, {"type": "object", "properties": []}, {"$ref": "#"}, {"$ref": "http://127.0.0.1/x"}, [], "x", None,
)  # fmt: skip


def nested(depth: int) -> dict[str, object]:
    schema: dict[str, object] = {"type": "string"}
    for _ in range(depth):
        schema = {"oneOf": [schema, schema]} if depth < 12 else {"oneOf": [schema]}
    return schema


def test_cve_2025_48944_malformed_tools_harm_nothing(server):
    for schema in BAD_SCHEMAS:
        tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
        for extra in ({"tool_choice": "none"}, {}, {"tool_choice": "auto"}, {"tool_choice": {"type": schema}}):
            answer = post(server, CHAT, {**HELLO, "tools": tools, **extra})
            choice = extra.get("tool_choice")
            is_refused = isinstance(choice, dict) or (schema in ([], "x") and choice != "none")
            assert answer.status_code == (400 if is_refused else 200), answer.text
    for tools in ([7], [{}], [{"type": "function"}], [{"type": []}], [None]):
        answer = post(server, CHAT, {**HELLO, "tools": tools, "tool_choice": "none"})
        assert answer.status_code in (200, 400)
        assert post(server, CHAT, {**HELLO, "tools": tools}).status_code == 400
    assert post(server, CHAT, HELLO).status_code == 200


@pytest.mark.parametrize(
    "field", ["response_format", "structured_outputs", "guided_json", "guided_regex", "guided_grammar"]
)
def test_vllm_54003_and_ghsa_7rgv_a_grammar_that_is_malformed_or_too_deep_is_refused_before_it_is_compiled(
    untouched, field
):
    for schema in (*BAD_SCHEMAS[:6], *BAD_SCHEMAS[7:], nested(40)):
        value = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        answer = post(untouched, CHAT, {**HELLO, field: value})
        assert answer.status_code == 400 and (error_of(answer)["param"] or field).startswith(field)


def test_cve_2025_48956_heads_lines_and_depths_are_bounded_before_anything_is_read(untouched):
    statuses = {
        "line": httpx.get(untouched.url + "/v1/models?" + "a" * 40_000, verify=False).status_code,
        "header": httpx.get(untouched.url + "/v1/models", headers={"x": "a" * 40_000}, verify=False).status_code,
        "headers": httpx.get(
            untouched.url + "/v1/models", headers={f"x{i}": "a" for i in range(9000)}, verify=False
        ).status_code,
    }
    assert set(statuses.values()) <= {400, 431}, statuses
    for body in (b"[" * 10**6, b'{"a":' * 10**5, b'{"metadata":' + b"[" * 65 + b"]" * 65 + b"}"):
        assert post(untouched, CHAT, body).status_code == 400


ADMIN = (
    "/collective_rpc", "/update_weights", "/update_weights_from_tensor", "/update_weights_from_disk", "/sleep",
    "/wake_up",
    "/reset_prefix_cache", "/server_info", "/scale_elastic_ep", "/restart_replicas",
    "/snapshot_request", "/resume_request",
    "/start_profile", "/stop_profile", "/pause", "/resume", "/abort_requests",
    "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/redoc", "/debug",
    "/fault_tolerance/apply",
)  # fmt: skip


def test_cve_2026_7301_and_cve_2025_10164_there_are_no_routes_that_administer(server):
    for path, method in itertools.product(ADMIN, ("GET", "POST")):
        assert httpx.request(method, server.url + path, json={}, verify=False).status_code == 404, path
    administers = {
        "/reset_prefix_cache", "/server_info", "/scale_elastic_ep", "/restart_replicas", "/snapshot_request",
        "/resume_request", "/start_profile", "/stop_profile", "/update_weights", "/sleep", "/wake_up",
        "/pause", "/resume",
    }  # fmt: skip
    assert {path for path in ROUTE_ACCESS if path in ADMIN} == administers
    assert {path for path, access in ROUTE_ACCESS.items() if access is Access.OPERATOR} == administers | {
        "/weight_info", "/is_sleeping", "/is_paused",
    }  # fmt: skip


def test_cve_2026_7301_the_one_route_that_administers_is_for_an_operators_key_alone(tmp_path):
    keys = tmp_path / "keys.yaml"
    keys.write_text("tenants:\n  ops: {keys: [ops-key-1234], operator: true}\n  red: {keys: [red-key-1234]}\n")
    with RunningServer(ScriptedEngine(), api_key_file=str(keys)) as server:
        statuses = [
            post(server, "/reset_prefix_cache", {}, headers=headers).status_code
            for headers in ({}, bearer("red-key-1234"), bearer("ops-key-1234"))
        ]
    assert statuses == [401, 403, 200]


def test_cve_2026_44222_no_field_brings_control_tokens_into_a_prompt(server):
    """Names of control tokens in every text that a chat template may show."""
    special = server.engine.tokenizer.special_ids
    names = [name for name in server.engine.tokenizer.convert_ids_to_tokens(sorted(special)) if name]
    assert len(names) >= 3

    def controls(body: dict[str, object]) -> list[int]:
        answer = post(server, CHAT, {"max_tokens": 1, **body})
        assert answer.status_code == 200, answer.text
        return [one for one in server.engine.prompts[-1] if one in special]

    for name in names:
        for text in (name, name * 3, f"a{name}", f"{name[:-1]}{name}{name[-1]}", f" {name} "):
            user = {"role": "user", "content": text}
            assert controls({"messages": [user]}) == controls({"messages": [{"role": "user", "content": "a"}]})
            assert controls({"messages": [{**user, "name": text}]}) == controls(
                {"messages": [{**user, "content": "a"}]}
            )
            tools = [{"type": "function", "function": {"name": text, "description": text, "parameters": {text: text}}}]
            plain = json.loads(json.dumps(tools).replace(json.dumps(text)[1:-1], "a"))
            asked = {"messages": [user], "tool_choice": "none"}
            assert controls({**asked, "tools": tools}) == controls({**asked, "tools": plain})
            post(server, COMPLETIONS, {"prompt": text, "max_tokens": 1})
            assert not set(server.engine.prompts[-1]) & set(special)
            ids = post(server, "/tokenize", {"prompt": text}).json()["tokens"]
            assert not set(ids) & set(special)
