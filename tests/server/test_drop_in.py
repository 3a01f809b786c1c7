"""Requests of clients made for other servers are taken, and what has no effect is said."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

from quire.errors import ValidationError
from quire.server.chat.protocol.messages import read_messages
from quire.server.chat.protocol.warnings import Warnings
from quire.tokenization.chat_template import ChatTemplate
from tests.server.servers import RunningServer

CHAT = "/v1/chat/completions"
ASKED: dict[str, Any] = {"model": "leaf", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "5"}


def post(server: RunningServer, path: str, body: dict[str, Any]) -> Any:
    return httpx.post(server.url + path, json=body, timeout=30)


def chat(server: RunningServer, *messages: dict[str, Any], **fields: Any) -> Any:
    return post(server, CHAT, {**ASKED, "messages": [*ASKED["messages"], *messages], **fields})


def prompt_text(server: RunningServer) -> str:
    text: str = server.engine.tokenizer.decode(server.engine.prompts[-1], skip_special_tokens=False)
    return text


def test_keys_of_messages_that_clients_of_others_send_are_named_and_change_nothing(server):
    answer = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    plain = chat(server, answer, RESULT).json()
    expected = prompt_text(server)
    extra = {"provider_specific_fields": {"a": 1}, "thinking_blocks": [{}], "id": "msg_1", "cache_control": None}
    sent = {**answer, **extra, "tool_calls": [{**CALL, "extra_content": {"google": 1}}]}
    answered = chat(server, sent, sent, RESULT)
    assert answered.json()["warnings"] == [
        f"messages[1].{name} has no effect"
        for name in ("provider_specific_fields", "thinking_blocks", "id", "tool_calls[0].extra_content")
    ]
    chat(server, sent, RESULT)
    assert prompt_text(server) == expected and "warnings" not in plain


@pytest.mark.parametrize(
    ("message", "param", "words"),
    [
        ({"role": "assistant", "content": "Well", "prefix": True}, "messages[1].prefix", "continue_final_message"),
        ({"role": "developer", "content": "x", "tools": [{}]}, "messages[1].tools", "tools of the request"),
        ({"role": "assistant", "audio": {"id": "a"}}, "messages[1].audio", "text"),
        ({"role": "assistant", "tool_calls": [CALL], "function_call": CALL["function"]},
         "messages[1].function_call", "tool_calls"),
        ({"role": "user", "contnt": "x"}, "messages[1]", "did you mean 'content'"),
    ],
    ids=["prefix", "tools of a message", "audio", "two forms of calls", "misspelt content"],
)  # fmt: skip
def test_keys_of_messages_that_would_change_the_prompt_are_refused_by_name(server, message, param, words):
    answer = chat(server, message)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == param and words in error["message"]


def test_a_function_call_of_the_older_form_is_a_tool_call(server):
    assert chat(server, {"role": "assistant", "content": "", "tool_calls": [CALL]}, RESULT).status_code == 200
    expected = prompt_text(server)
    older = {"role": "assistant", "content": "", "function_call": CALL["function"], "prefix": False}
    assert chat(server, older, {**RESULT, "role": "tool"}).status_code == 200
    assert prompt_text(server) == expected


def test_a_server_that_is_strict_refuses_unused_keys_of_messages():
    message = {"role": "assistant", "content": "x", "id": "m"}
    with pytest.raises(ValidationError, match=r"messages\[0\].id has no effect"):
        read_messages([message], Warnings(is_strict=True))
    with pytest.raises(ValidationError, match="not a standard role"):
        read_messages([{"role": "critic", "content": "x"}], Warnings(is_strict=True))


def test_unused_keys_without_end_are_named_a_few_times():
    warnings = Warnings()
    messages = [{"role": "user", "content": "x", **{f"k{i}": 1 for i in range(500)}} for _ in range(20)]
    kept = read_messages(messages, warnings)
    assert len(warnings.texts) == 32 and kept[-1] == {"role": "user", "content": "x"}


def test_a_role_of_the_template_s_own_goes_to_it(server):
    answer = chat(server, {"role": "usr", "content": "And?"})
    assert answer.status_code == 200 and "<|im_start|>usr\nAnd?" in prompt_text(server)
    (warning,) = answer.json()["warnings"]
    assert "messages[1].role='usr'" in warning and "did you mean user?" in warning


@pytest.mark.parametrize("empty", [{}, {"content": None}, {"content": None, "tool_calls": []}, {"reasoning": "Hm."}])
def test_an_assistant_s_message_may_be_empty(server, empty):
    assert chat(server, {"role": "assistant", **empty}, {"role": "user", "content": "So?"}).status_code == 200
    assert "<|im_start|>assistant\n<|im_end|>\n" in prompt_text(server)


def test_fields_that_clients_read_are_there_without_being_asked_for(server):
    client = server.client()
    answer = client.chat.completions.create(**ASKED)
    message = answer.choices[0].message
    assert message.reasoning is None and message.tool_calls is None
    assert answer.prompt_token_ids is None and answer.choices[0].token_ids is None
    first, *_, last = client.chat.completions.create(**ASKED, stream=True)
    assert first.prompt_token_ids is None and last.choices[0].token_ids is None
    completion = client.completions.create(model="leaf", prompt="Hello", max_tokens=2)
    assert completion.choices[0].token_ids is None and completion.choices[0].prompt_token_ids is None
    for chunk in client.completions.create(model="leaf", prompt="Hello", max_tokens=2, stream=True):
        assert chunk.choices[0].token_ids is None and chunk.choices[0].prompt_token_ids is None


def test_an_answer_goes_back_into_the_conversation_as_it_came(server):
    client = server.client()
    answer = client.chat.completions.create(**ASKED).choices[0].message
    again = [*ASKED["messages"], answer, {"role": "user", "content": "And?"}]
    assert client.chat.completions.create(**{**ASKED, "messages": again}).choices
    with pytest.raises(openai.BadRequestError, match="prefix"):
        client.chat.completions.create(**{**ASKED, "messages": [*again, {**answer.model_dump(), "prefix": True}]})


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
@pytest.mark.parametrize(
    "fields", [{"min_tokens": 10000, "max_tokens": 10000}, {"min_tokens": 10000, "max_tokens": None}]
)
def test_more_tokens_than_fit_cannot_be_demanded(server, path, fields):
    body = {"prompt": "Hello"} if path != CHAT else ASKED
    answer = post(server, path, {**body, **fields})
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == "min_tokens"
    assert ("min_tokens=10000" in error["message"] and "new tokens" in error["message"]) or path != CHAT


@pytest.mark.parametrize(
    ("fields", "warning"),
    [
        ({"reasoning_effort": "high"}, "reasoning_effort has no effect: the chat template does not use it"),
        ({"verbosity": "low"}, "verbosity has no effect"),
        ({"prediction": {"type": "content", "content": "x"}}, "prediction has no effect"),
        ({"temperature": 5}, None),
        ({"temperature": 1e300}, None),
        ({"stop": [f"stop {i}" for i in range(20)]}, None),
    ],
    ids=["reasoning_effort", "verbosity", "prediction", "temperature", "huge temperature", "stop"],
)
def test_fields_that_ordinary_clients_send_are_taken(server, fields, warning):
    answer = chat(server, **fields)
    assert answer.status_code == 200
    assert answer.json().get("warnings") == ([warning] if warning else None)


@pytest.mark.parametrize(
    ("template", "effort", "written", "num_warnings"),
    [
        ("{{ reasoning_effort }}", "high", "high", 0),
        ("{{ enable_thinking }}", "none", "False", 0),
        ("{{ enable_thinking }}", "low", "True", 1),
        ("{{ reasoning_effort }} {{ enable_thinking }}", "none", "none False", 0),
    ],
)
def test_effort_goes_to_templates_that_take_it(server, monkeypatch, template, effort, written, num_warnings):
    monkeypatch.setattr(server.engine, "chat_template", ChatTemplate(template))
    answer = chat(server, reasoning_effort=effort)
    assert len(answer.json().get("warnings", [])) == num_warnings and prompt_text(server) == written
    tokens = post(server, "/tokenize", {"messages": ASKED["messages"], "reasoning_effort": effort}).json()["tokens"]
    assert tokens == server.engine.prompts[-1]
    own = chat(server, reasoning_effort=effort, chat_template_kwargs={"reasoning_effort": "x", "enable_thinking": "y"})
    assert own.status_code == 200 and set(prompt_text(server).split()) <= {"x", "y"}
    assert chat(server, reasoning_effort="enormous").json()["error"]["param"] == "reasoning_effort"


LONG = "word " * 4000
TOO_LONG = [
    (CHAT, {"messages": [{"role": "user", "content": LONG}]}, "messages"),
    (CHAT, {"messages": [{"role": "user", "content": "x" * 300_000}]}, "messages"),
    (CHAT, {"messages": [{"role": "user", "content": "x" * 2_000_000}]}, "messages"),
    ("/v1/completions", {"prompt": LONG}, "prompt"),
    ("/v1/completions", {"prompt": [5] * 4000}, "prompt"),
    ("/v1/completions", {"prompt": "x" * 300_000}, "prompt"),
    ("/v1/responses", {"input": LONG}, "input"),
    ("/v1/responses", {"input": "x" * 300_000}, "input"),
]


@pytest.mark.parametrize(("path", "body", "param"), TOO_LONG)
def test_a_prompt_that_is_too_long_is_refused_in_the_words_that_clients_look_for(server, path, body, param):
    answer = post(server, path, body)
    error = answer.json()["error"]
    assert answer.status_code == 400 and (error["code"], error["param"]) == ("context_length_exceeded", param)
    assert error["message"].startswith("This model's maximum context length is 2048 tokens. However, ")


def test_truncation_auto_leaves_out_the_beginning_and_leaves_room_for_the_answer(server):
    body = {"input": LONG + "the end", "max_output_tokens": 48, "truncation": "auto"}
    answer = post(server, "/v1/responses", body).json()
    assert answer["truncation"] == "auto" and answer["usage"]["input_tokens"] == 2000
    assert answer["usage"]["output_tokens"] == 48 and "the end" in prompt_text(server)
    short = post(server, "/v1/responses", {**body, "input": "Hello"}).json()
    assert short["usage"]["input_tokens"] < 100


def test_without_a_tokenizer_an_echo_is_of_ids(server, monkeypatch):
    monkeypatch.setattr(server.engine, "tokenizer", None)
    body = {"prompt": [5, 6, 7], "echo": True, "max_tokens": 2, "return_token_ids": True}
    (choice,) = post(server, "/v1/completions", body).json()["choices"]
    assert choice["prompt_token_ids"] == [5, 6, 7] and len(choice["token_ids"]) == 2
