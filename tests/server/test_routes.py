"""Paths that clients of OpenAI, vLLM and SageMaker ask: answered, or refused by name."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import openai
import pytest

from quire.tokenization.chat_template import ChatTemplate
from tests.server.engines import ScriptedEngine
from tests.server.servers import RunningServer

HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}


def test_the_list_of_models_is_below_both_forms_of_its_path(server):
    for path in ("/v1/models", "/v1/models/"):
        listed = httpx.get(server.url + path).json()
        assert listed["object"] == "list" and listed["data"][0]["id"] == "leaf"
    assert listed["data"][0]["root"] == server.engine.config.model.model


def test_a_path_with_a_slash_too_many_is_refused_and_not_redirected_to_the_host_that_the_client_names(server):
    for method, path in (("POST", "/v1/completions/"), ("GET", "/health/"), ("DELETE", "/v1/responses/x/")):
        answer = httpx.request(method, server.url + path, json={} if method == "POST" else None)
        assert (answer.status_code, answer.headers.get("location")) == (404, None)
        assert "not found" in answer.json()["error"]["message"]


def test_head_is_answered_as_get_without_its_body(server):
    for path in ("/", "/health", "/v1/models", "/metrics"):
        answer = httpx.head(server.url + path)
        assert (answer.status_code, answer.content) == (200, b"")
    assert httpx.head(server.url + "/nothing").status_code == 404


@pytest.mark.parametrize(
    ("method", "path", "words"),
    [
        ("POST", "/v1/embeddings", "generates text"),
        ("POST", "/v1/rerank", "generates text"),
        ("POST", "/score", "generates text"),
        ("POST", "/v1/audio/transcriptions", "audio"),
        ("POST", "/v1/images/generations", "images"),
        ("POST", "/v1/moderations", "moderation"),
        ("GET", "/v1/files", "quire run-batch"),
        ("POST", "/v1/batches", "quire run-batch"),
        ("POST", "/v1/load_lora_adapter", "LoRA"),
        ("POST", "/sleep", "--enable-sleep-mode"),
        ("GET", "/is_sleeping", "--enable-sleep-mode"),
        ("POST", "/pause", "--enable-sleep-mode"),
        ("POST", "/start_profile", "profiling"),
        ("POST", "/v1/chat/completions/render", "same server"),
        ("POST", "/reset_prefix_cache", "API keys"),
        ("POST", "/collective_rpc", "LLM.collective_rpc"),
        ("POST", "/abort_requests", "close the connection"),
        ("POST", "/release_kv_cache_memory", "use /sleep"),
        ("POST", "/start_weight_update", "/update_weights"),
        ("GET", "/is_scaling_elastic_ep", "/scale_elastic_ep"),
        ("GET", "/fault_tolerance/status", "/health"),
        ("GET", "/kv_event_sources", "--kv-events-config"),
    ],
)
def test_paths_of_others_are_refused_by_name(server, method, path, words):
    answer = httpx.request(method, server.url + path, json={} if method == "POST" else None)
    error = answer.json()["error"]
    assert answer.status_code == 404 and error["code"] == "not_supported" and error["type"] == "NotFoundError"
    assert f"{path} is not supported by this server: " in error["message"] and words in error["message"]


def test_a_path_that_nobody_knows_is_told_where_the_paths_are(server):
    error = httpx.get(server.url + "/v1/nothing").json()["error"]
    assert error["code"] == 404 and "/v1/nothing" in error["message"] and "/docs" in error["message"]


def test_the_docs_are_a_page_that_loads_nothing_from_elsewhere(server):
    answer = httpx.get(server.url + "/docs")
    assert answer.headers["content-type"].startswith("text/html") and "openapi.json" in answer.text
    assert "http:" not in answer.text and "https:" not in answer.text and "src=" not in answer.text


def test_invocations_are_chats_or_completions_by_their_body(server):
    for body, kind in (({**HELLO}, "chat.completion"), ({"prompt": "Go", "max_tokens": 2}, "text_completion")):
        assert httpx.post(server.url + "/invocations", json=body).json()["object"] == kind
        streamed = httpx.post(server.url + "/invocations", json={**body, "stream": True})
        assert streamed.text.endswith("data: [DONE]\n\n")
    for content in (b"{", b"[]", b"{}"):
        answer = httpx.post(server.url + "/invocations", content=content, headers={"content-type": "application/json"})
        assert answer.status_code == 400


def test_the_tokens_of_a_response_s_prompt_are_counted_as_its_answer_counts_them(server):
    client = server.client()
    asked = {"model": "leaf", "input": "Hello", "instructions": "Be brief."}
    counted = client.responses.input_tokens.count(**asked)
    assert counted.object == "response.input_tokens"
    assert counted.input_tokens == client.responses.create(**asked, max_output_tokens=1).usage.input_tokens
    with pytest.raises(openai.NotFoundError):
        client.responses.input_tokens.count(**{**asked, "model": "gpt"})


def test_the_tokenizer_s_settings_are_told_only_where_the_operator_says_so(server):
    refused = httpx.get(server.url + "/tokenizer_info")
    assert refused.status_code == 404 and "--enable-tokenizer-info-endpoint" in refused.text


def test_settings_are_told_where_the_operator_allows_it():
    settings = {"enable_tokenizer_info_endpoint": True, "disable_fastapi_docs": True, "api_key": "a-key-of-12-chars"}
    key = {"authorization": "Bearer a-key-of-12-chars"}
    with RunningServer(ScriptedEngine(), **settings) as running:
        info = httpx.get(running.url + "/server_info", headers=key).json()
        assert info["config"]["model"]["max_model_len"] == 2048
        info = httpx.get(running.url + "/tokenizer_info", headers=key).json()
        assert info["eos_token"] == "<|im_end|>" and "im_start" in info["chat_template"]
        for path in ("/docs", "/openapi.json"):
            assert httpx.get(running.url + path, headers=key).status_code == 404
        assert httpx.get(running.url + "/ready").status_code == 200


def test_a_batch_has_the_choices_of_each_conversation(server):
    conversations = [[{"role": "user", "content": text}] for text in ("One", "Two", "Three")]
    body = {"messages": conversations, "max_tokens": 3, "n": 2, "temperature": 1.0, "seed": 5, "return_token_ids": True}
    batch = httpx.post(server.url + "/v1/chat/completions/batch", json=body).json()
    alone = [
        httpx.post(f"{server.url}/v1/chat/completions", json={**body, "messages": one}).json() for one in conversations
    ]
    assert [choice["index"] for choice in batch["choices"]] == list(range(6))
    texts = [choice["message"]["content"] for one in alone for choice in one["choices"]]
    assert [choice["message"]["content"] for choice in batch["choices"]] == texts
    assert batch["choices"][4]["prompt_token_ids"] == alone[2]["prompt_token_ids"]
    assert batch["usage"]["total_tokens"] == sum(one["usage"]["total_tokens"] for one in alone)
    assert server.state.admission.num_answers == 0


def test_streams_go_on_while_a_large_batch_is_prepared_and_started(server, monkeypatch):
    engine, turns, started, counting = server.state.engine, [0], [], []
    open_stream = engine.open_stream

    def noted(*args: Any, **options: Any) -> Any:
        if not started:
            counting.append(asyncio.ensure_future(count()))
        started.append(turns[0])
        return open_stream(*args, **options)

    async def count() -> None:
        while len(started) < 20:
            turns[0] += 1
            await asyncio.sleep(0)

    monkeypatch.setattr(engine, "open_stream", noted)
    body = {"messages": [[{"role": "user", "content": "One"}]] * 20, "max_tokens": 2}
    assert httpx.post(server.url + "/v1/chat/completions/batch", json=body).status_code == 200
    assert len(set(started)) == 20


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": "x"}]}, "messages"),
        ({"messages": [[{"role": "user", "content": "x"}], []]}, "messages"),
        ({"stream": True}, "stream"),
    ],
    ids=["no conversation", "one conversation", "an empty conversation", "a stream"],
)
def test_a_batch_that_cannot_be_answered_is_refused_by_name(server, fields, param):
    body = {"messages": [[{"role": "user", "content": "Hello"}]], **fields}
    answer = httpx.post(server.url + "/v1/chat/completions/batch", json=body)
    assert answer.status_code == 400 and answer.json()["error"]["param"].startswith(param)
    assert server.state.admission.num_answers == 0


def test_a_conversation_with_tools_is_written_by_the_template_for_tools():
    engine = ScriptedEngine()
    engine.chat_template = ChatTemplate("plain")
    engine.chat_template.with_tools = ChatTemplate("for {{ tools[0].function.name }} <tool_call>")
    tools = [{"type": "function", "function": {"name": "search", "parameters": {"type": "object"}}}]
    with RunningServer(engine) as server:
        for given, expected in ((None, "plain"), (tools, "for search <tool_call>")):
            body = {"messages": [{"role": "user", "content": "Hi"}], "tools": given}
            tokens = httpx.post(server.url + "/tokenize", json=body).json()["tokens"]
            assert engine.tokenizer.decode(tokens) == expected
