"""Flags of vLLM that the server has: what they change in answers."""

from __future__ import annotations

import logging

import httpx
import pytest

from quire.cli import serve
from quire.config.build import build_config
from quire.engine.config_lookup import look_up
from quire.entrypoints.openai import api_server
from tests.server.engines import ScriptedEngine, scripted_config
from tests.server.servers import RunningServer

TOOL = {"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": {"type": "object"}}}
QUESTION = [{"role": "user", "content": "Hello"}]


def test_pages_may_use_the_methods_and_headers_that_are_named():
    settings = {"allowed_origins": ("http://a.example",), "allowed_methods": ("GET",), "allowed_headers": ("x-own",)}
    with RunningServer(ScriptedEngine(), **settings, allow_credentials=True) as server:

        def preflight(method: str) -> httpx.Response:
            headers = {"origin": "http://a.example", "access-control-request-method": method}
            return httpx.options(f"{server.url}/v1/models", headers=headers)

        allowed = preflight("GET")
        assert allowed.status_code == 200 and allowed.headers["access-control-allow-credentials"] == "true"
        assert "x-own" in allowed.headers["access-control-allow-headers"].lower()
        assert preflight("DELETE").status_code == 400


def test_named_paths_have_no_line_in_the_access_log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(logging.getLogger("quire"), "propagate", True)
    with (  # a line is written after its answer: the server ends first
        caplog.at_level(logging.INFO, "quire.access"),
        RunningServer(ScriptedEngine(), disable_access_log_for_endpoints=("/version",)) as server,
    ):
        httpx.get(f"{server.url}/version")
        httpx.get(f"{server.url}/v1/models")
    assert [record for record in caplog.records if "/v1/models" in record.getMessage()]
    assert not [record for record in caplog.records if "/version" in record.getMessage()]


def test_several_names_are_served():
    engine = ScriptedEngine()
    engine.config = scripted_config(served_model_name=["first", "second"])
    with RunningServer(engine) as server:
        client = server.client()
        assert [model.id for model in client.models.list()] == ["first", "second"]
        answer = client.completions.create(model="second", prompt="Hi", max_tokens=2)
        assert answer.model == "second"


def test_variables_of_the_chat_template_have_defaults_and_tools_may_be_left_out():
    template = (
        "{% if brief %}a{% else %}a much longer prompt of many words{% endif %}{% if tools %} and tools{% endif %}"
    )
    settings = {"default_chat_template_kwargs": {"brief": True}, "exclude_tools_when_tool_choice_none": True}
    with RunningServer(ScriptedEngine(), trust_request_chat_template=True, **settings) as server:

        def num_prompt_tokens(**fields: object) -> int:
            body = {"model": "leaf", "messages": QUESTION, "max_tokens": 1, "chat_template": template, **fields}
            answer = httpx.post(f"{server.url}/v1/chat/completions", json=body)
            assert answer.status_code == 200, answer.text
            return answer.json()["usage"]["prompt_tokens"]

        brief = num_prompt_tokens()
        assert num_prompt_tokens(chat_template_kwargs={"brief": False}) > brief
        assert num_prompt_tokens(tools=[TOOL], tool_choice="none") == brief < num_prompt_tokens(tools=[TOOL])


def test_settings_replace_what_a_models_files_say():
    config = build_config(hf_overrides={"max_position_embeddings": 99, "rope_parameters": {"rope_theta": 5000.0}})
    resolved, _, _ = look_up(config)
    assert (
        resolved.max_model_len == 99
        and resolved.arch is not None
        and resolved.arch.layers[0].attention.rope.theta == 5000.0
    )


def test_a_length_among_a_models_own_fields_changes_nothing_and_is_said_to():
    resolved, _, decisions = look_up(build_config(hf_overrides={"max_model_len": 99}))
    assert resolved.max_model_len == look_up(build_config())[0].max_model_len != 99
    assert any("hf_overrides.max_model_len=unused" in str(one) for one in decisions)


def test_the_module_of_vllms_server_is_quire_serve(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(serve, "run", lambda args: 7 if args.model_argument == "leaf" else 0)
    assert api_server.main(["leaf"]) == 7
