"""A request field declared once is a field of every API, and reaches the engine from each with the same meaning."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from quire.config.server import LimitsConfig
from quire.core.sampling_params import SamplingParams
from quire.server.api.anthropic.protocol import MESSAGES_FIELDS
from quire.server.api.anthropic.translation import chat_request as messages_chat
from quire.server.api.openai.protocol.completion import COMPLETION_FIELDS, completion_params
from quire.server.api.responses.protocol import RESPONSES_FIELDS
from quire.server.api.responses.translation import chat_request as responses_chat
from quire.server.chat.protocol.chat import CHAT_FIELDS, ChatRequest, chat_params
from quire.server.chat.protocol.fields import EngineFields, SamplingFields
from quire.server.chat.protocol.reading import RequestFields, read_request
from quire.server.chat.protocol.warnings import Warnings

HELLO = [{"role": "user", "content": "Hello"}]
LIMITS = LimitsConfig()
ENGINE = msgspec.structs.fields(EngineFields)
SAMPLING = [field for field in msgspec.structs.fields(SamplingFields) if field not in ENGINE]
SAMPLES: dict[Any, Any] = {
    int | None: 2, float | None: 0.5, str | None: "left", list[int] | None: [3, 5],
    list[str] | None: ["no"], dict[str, float] | None: {"7": 1.5}, dict[str, Any] | None: {"regex": "[ab]+"},
}  # fmt: skip
APART = {
    "messages", "tools", "tool_choice", "stream_options",  # same name, another form
    "model", "stop", "max_tokens", "chat_template", "chat_template_kwargs", "documents",  # not in all three
    "parallel_tool_calls", "top_logprobs", "thinking_token_budget",
}  # fmt: skip
"""Fields that more than one API declares by itself."""


def read(fields: RequestFields[Any], **values: Any) -> Any:
    """The request of a body with these values, none of which is left out."""
    body = json.dumps(values).encode()
    request, warnings = read_request(body, fields, max_depth=64, max_containers=1000, is_strict=True)
    assert not warnings.texts
    return request


def chat_of(api: str, **values: Any) -> ChatRequest:
    """The chat that a request of `api` with these values becomes."""
    if api == "messages":
        body = read(MESSAGES_FIELDS, messages=HELLO, max_tokens=9, **values)
        return messages_chat(body, Warnings(is_strict=True), LIMITS)
    if api == "responses":
        return responses_chat(
            read(RESPONSES_FIELDS, input="Hello", max_output_tokens=9, **values), [], None, Warnings()
        )
    return read(CHAT_FIELDS, messages=HELLO, max_tokens=9, **values)


def sample(field: msgspec.structs.FieldInfo) -> Any:
    """A value that `field` takes, and that is not its default."""
    if field.type == bool | None:
        return not getattr(SamplingParams(), field.name, False)
    return SAMPLES[field.type]


@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
@pytest.mark.parametrize("field", SAMPLING, ids=lambda field: field.name)
def test_a_sampling_field_reaches_the_sampling_parameters_from_every_api(field, api):
    value = sample(field)
    params = chat_params(chat_of(api, **{field.name: value}), {}, LIMITS)
    expected = SamplingParams.from_optional(**{field.name: value, "max_tokens": 9})
    assert getattr(params, field.name) == getattr(expected, field.name) != getattr(SamplingParams(), field.name)


@pytest.mark.parametrize("field", SAMPLING, ids=lambda field: field.name)
def test_a_sampling_field_reaches_the_sampling_parameters_from_a_completion(field):
    value = sample(field)
    params = completion_params(read(COMPLETION_FIELDS, prompt="a", **{field.name: value}), {}, LIMITS, 1)
    expected = SamplingParams.from_optional(**{field.name: value, "max_tokens": 16})
    assert getattr(params, field.name) == getattr(expected, field.name)


@pytest.mark.parametrize("api", ["responses", "messages"])
@pytest.mark.parametrize("field", ENGINE, ids=lambda field: field.name)
def test_a_field_for_the_engine_reaches_the_chat_from_every_api(field, api):
    value = sample(field)
    assert getattr(chat_of(api, **{field.name: value}), field.name) == value


def test_what_all_apis_share_is_declared_once():
    own = [
        set(fields.request.__struct_fields__) - set(SamplingFields.__struct_fields__)
        for fields in (CHAT_FIELDS, RESPONSES_FIELDS, MESSAGES_FIELDS)
    ]
    twice = (own[0] & own[1]) | (own[0] & own[2]) | (own[1] & own[2])
    assert twice == APART
