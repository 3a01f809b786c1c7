"""A Messages request as a chat: each field where chats have it, and what is not used is named."""

from __future__ import annotations

import copy
import json
from typing import Any

import msgspec
import pytest

from quire.config.server import LimitsConfig
from quire.core.inputs import parse_messages
from quire.errors import QuireClientError, ValidationError
from quire.server.api.anthropic.protocol import MESSAGES_FIELDS, MessagesRequest
from quire.server.api.anthropic.translation import chat_request
from quire.server.chat.protocol.chat import ChatRequest
from quire.server.chat.protocol.reading import read_request
from quire.server.chat.protocol.warnings import MAX_WARNINGS

TOOL = {"name": "f", "description": "d", "input_schema": {"type": "object"}}
HELLO = {"role": "user", "content": "Hello"}


def translated(**fields: Any) -> tuple[ChatRequest, list[str]]:
    """(the chat, warnings) of a request."""
    body = json.dumps({"max_tokens": 2000, "messages": [HELLO], **fields}).encode()
    request, warnings = read_request(body, MESSAGES_FIELDS, max_depth=64, max_containers=100_000, is_strict=False)
    return chat_request(request, warnings, LimitsConfig()), warnings.texts


def test_every_field_is_carried_over_or_translated():
    made = {
        "messages",
        "system",
        "tools",
        "tool_choice",
        "thinking",
        "output_config",
        "output_format",
        "stop_sequences",
    }
    shared = set(MessagesRequest.__struct_fields__) & set(ChatRequest.__struct_fields__)
    assert made | shared == set(MessagesRequest.__struct_fields__)
    types = {field.name: field.type for field in msgspec.structs.fields(ChatRequest)}
    for field in msgspec.structs.fields(MessagesRequest):
        assert field.name in made or types[field.name] == field.type, field.name


@pytest.mark.parametrize(
    ("choice", "expected", "parallel"),
    [
        ({"type": "auto"}, "auto", None),
        ({"type": "any", "disable_parallel_tool_use": True}, "required", False),
        ({"type": "tool", "name": "f"}, {"type": "function", "function": {"name": "f"}}, None),
        ({"type": "none"}, "none", None),
    ],
    ids=["auto", "any", "tool", "none"],
)
def test_a_choice_of_tools_is_that_of_a_chat(choice, expected, parallel):
    chat, warnings = translated(tools=[{**TOOL, "strict": True, "cache_control": None}], tool_choice=choice)
    assert (chat.tool_choice, chat.parallel_tool_calls) == (expected, parallel) and not warnings
    function = {"name": "f", "description": "d", "parameters": {"type": "object"}, "strict": True}
    assert chat.tools == [{"type": "function", "function": function}]


def test_a_choice_without_tools_asks_for_nothing():
    assert translated(tools=[], tool_choice={"type": "auto"})[0].tool_choice is None


def test_a_schema_is_the_form_of_the_answer_from_either_field():
    form = {"type": "json_schema", "schema": {"type": "object"}}
    for fields in ({"output_format": form}, {"output_config": {"format": form, "effort": None}}):
        chat, warnings = translated(**fields)
        assert chat.response_format["json_schema"]["schema"] == {"type": "object"} and not warnings
    assert translated(output_config={"effort": "high"})[1] == ["effort has no effect"]


@pytest.mark.parametrize(
    ("thinking", "kwargs", "shows"),
    [
        ({"type": "enabled", "budget_tokens": 1024}, {"enable_thinking": True, "thinking": True}, None),
        ({"type": "disabled"}, {"enable_thinking": False, "thinking": False}, False),
        ({"type": "adaptive"}, None, None),
        ({"type": "adaptive", "display": "omitted"}, None, False),
    ],
    ids=["enabled", "disabled", "adaptive", "omitted"],
)
def test_thinking_is_what_templates_know_and_the_clients_own_variables_win(thinking, kwargs, shows):
    chat, _ = translated(thinking=thinking)
    assert (chat.chat_template_kwargs, chat.include_reasoning) == (kwargs, shows)
    assert chat.thinking_token_budget == thinking.get("budget_tokens")
    chat, _ = translated(thinking=thinking, chat_template_kwargs={"enable_thinking": 7})
    assert chat.chat_template_kwargs["enable_thinking"] == 7


def test_turns_of_one_role_are_one_message_and_results_are_their_own():
    result = {"type": "tool_result", "tool_use_id": "1"}
    blocks = [{"type": "redacted_thinking", "data": "x"}, {"type": "thinking", "thinking": "a"}]
    call = {"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}}
    messages = [
        {"role": "system", "content": "s"}, HELLO, HELLO,
        {"role": "assistant", "content": blocks}, {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result, {"type": "text", "text": "t"}]}, {"role": "system", "content": "u"},
    ]  # fmt: skip
    chat, warnings = translated(messages=messages, system="top")
    function = {"name": "f", "arguments": {"a": 1}}
    assert chat.messages == [
        {"role": "system", "content": "top\ns"},
        {"role": "user", "content": "Hello\nHello"},
        {
            "role": "assistant", "content": None, "reasoning_content": "a",
            "tool_calls": [{"id": "1", "type": "function", "function": function}],
        },
        {"role": "tool", "content": "", "tool_call_id": "1", "name": "f"},
        {"role": "user", "content": "t"},
        {"role": "system", "content": "u"},
    ]  # fmt: skip
    assert warnings == ["redacted_thinking has no effect: only its provider can read it"]


def test_thousands_of_unknown_fields_in_blocks_are_not_each_looked_up():
    block = {"type": "text", "text": "x", **{f"k{i}": 0 for i in range(3000)}}
    message = {"role": "user", "content": [block], **{f"k{i}": 0 for i in range(3000)}}
    _, warnings = translated(messages=[message])
    assert len(warnings) == MAX_WARNINGS and all(len(warning) < 300 for warning in warnings)


@pytest.mark.parametrize("where", ["system", "content"])
def test_strict_servers_refuse_a_field_of_a_block(where):
    block = {"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}
    given = {"system": [block]} if where == "system" else {"messages": [{"role": "user", "content": [block]}]}
    body = json.dumps({"max_tokens": 9, "messages": [HELLO], **given}).encode()
    request, warnings = read_request(body, MESSAGES_FIELDS, max_depth=64, max_containers=1000, is_strict=True)
    with pytest.raises(ValidationError, match="cache_control"):
        chat_request(request, warnings, LimitsConfig())


RICH: dict[str, Any] = {
    "max_tokens": 2000,
    "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "t", "signature": ""},
                {"type": "tool_use", "id": "1", "name": "f", "input": {"a": [1]}},
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": [], "is_error": True}]},
    ],
    "tools": [TOOL],
    "tool_choice": {"type": "tool", "name": "f"},
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "output_config": {"format": {"type": "json_schema", "schema": {}}},
    "stop_sequences": ["x"],
}
VALUES = (
    None,
    True,
    -1,
    0,
    2**70,
    1.5,
    "",
    "text",
    "\ud7ff\U0010ffff",
    [],
    {},
    [[]],
    [None],
    {"type": "text"},
    {"type": []},
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where there is something inside of `value`."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for name, inner in items for place in [(*path, name), *places(inner, (*path, name))]]


@pytest.mark.parametrize("value", VALUES, ids=range(len(VALUES)))
def test_a_wrong_value_anywhere_is_refused_or_taken_and_never_more(value):
    num_refused = 0
    for *path, last in places(RICH):
        request = copy.deepcopy(RICH)
        inner: Any = request
        for name in path:
            inner = inner[name]
        inner[last] = value
        try:
            chat, _ = translated(**request)
            parse_messages(chat.messages)
        except QuireClientError as error:
            num_refused += 1
            assert len(error.message) < 1000
    assert num_refused > 10
