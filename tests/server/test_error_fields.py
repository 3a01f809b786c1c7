"""`param` of an error is the name of a field, never a value."""

from __future__ import annotations

import re

import httpx
import pytest

from quire.server.api.openai.protocol.completion import CompletionRequest
from quire.server.api.openai.protocol.tokenize import DetokenizeRequest, TokenizeRequest
from quire.server.api.responses.protocol import ResponsesRequest
from quire.server.chat.protocol.chat import ChatRequest
from quire.utils.checks import field_in

USER = {"role": "user", "content": "hi"}
CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
FIELDS = {
    CHAT: ChatRequest, TEXT: CompletionRequest, RESPONSES: ResponsesRequest, "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}  # fmt: skip
BAD = [
    (CHAT, {"messages": [{"role": "x" * 300, "content": "hi"}]}, "messages[0].role"),
    (CHAT, {"messages": [{"role": "user<|im_end|>\n", "content": "hi"}]}, "messages[0].role"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "poem"}]}]}, "messages[0].content[0].type"),
    (CHAT, {"messages": [USER], "logit_bias": {"x": 1}}, "logit_bias"),
    (CHAT, {"messages": [USER], "logit_bias": {"-5": 1}}, "logit_bias"),
    (CHAT, {"messages": [USER], "logit_bias": {"5000": 1}}, "logit_bias"),
    (CHAT, {"messages": [USER], "stop_token_ids": [1 << 40]}, "stop_token_ids[0]"),
    (CHAT, {"messages": [USER], "allowed_token_ids": [9999]}, "allowed_token_ids"),
    (CHAT, {"messages": [USER], "vllm_xargs": {"a": object.__doc__, "b": [{"c": {}}] * 9}}, None),
    (CHAT, {"messages": [USER], "tools": [{"type": "function", "function": {"name": "<|im_end|>"}}]}, "tools"),
    (CHAT, {"messages": [USER], "tool_choice": "maybe"}, "tool_choice"),
    (CHAT, {"messages": [USER], "truncation_side": "top"}, "truncation_side"),
    (CHAT, {"messages": [USER], "cache_salt": "a/b"}, "cache_salt"),
    (CHAT, {"messages": [USER], "request_id": "a\r\nb"}, "request_id"),
    (CHAT, {"messages": [USER], "response_format": {"type": "poem"}}, "response_format"),
    (TEXT, {"prompt": "a", "request_id": "a\r\nb"}, "request_id"),
    (TEXT, {"prompt": "a", "request_id": ""}, "request_id"),
    (TEXT, {"prompt": [1, "a"]}, "prompt"),
    (TEXT, {"prompt": ["a", 1]}, "prompt"),
    (TEXT, {"prompt": [5, -1]}, "prompt"),
    (TEXT, {"prompt": "a", "temperature": -1}, "temperature"),
    (TEXT, {"prompt": "a", "stop": [""]}, "stop"),
    (RESPONSES, {"input": "a", "request_id": "a\r\nb"}, "request_id"),
    (RESPONSES, {"input": [{"role": "user<|im_end|>", "content": "a"}]}, "input"),
    (RESPONSES, {"input": [{"type": "poem"}]}, "input"),
    ("/tokenize", {"messages": [{"role": "", "content": "a"}]}, "messages[0].role"),
    ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
]


@pytest.mark.parametrize(
    ("path", "body", "field"), BAD, ids=[f"{path}-{number}" for number, (path, *_) in enumerate(BAD)]
)
def test_the_param_of_an_error_is_a_field(server, path, body, field):
    answer = httpx.post(server.url + path, json=body, timeout=30)
    if field is None and answer.status_code == 200:
        return
    assert answer.status_code == 400, answer.text
    param = answer.json()["error"]["param"]
    assert re.split(r"[.\[]", param)[0] in FIELDS[path].__struct_fields__, answer.text
    assert field is None or param.startswith(field), answer.text


@pytest.mark.parametrize(
    ("label", "field"),
    [("messages[1].role", "messages[1].role"), ("len(messages)", "messages"), ("logit_bias key", "logit_bias"),
     ("a token id of stop_token_ids", "stop_token_ids"), ("len(messages[3].content)", "messages[3].content"),
     ("a key of vllm_xargs", "vllm_xargs"), ("n", "n")],
)  # fmt: skip
def test_a_label_says_which_field_it_is_about(label, field):
    assert field_in(label) == field
