"""Items of a conversation become the messages of a chat that says the same; requests become chats."""

from __future__ import annotations

from typing import Any

import pytest

from quire.errors import UnsupportedError, ValidationError
from quire.server.api.responses.items import messages_of, read_items
from quire.server.api.responses.protocol import ReasoningConfig, ResponsesRequest, check_request
from quire.server.api.responses.translation import chat_request
from quire.server.chat.protocol.warnings import Warnings


def messages(items: list[dict[str, Any]], developer_role: str = "system") -> list[dict[str, Any]]:
    return messages_of(read_items(items, Warnings()), developer_role)


def thinking(text: str) -> dict[str, Any]:
    return {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}


def call(number: int, arguments: str = "{}") -> dict[str, Any]:
    return {"type": "function_call", "call_id": f"c{number}", "name": "add", "arguments": arguments}


def result(number: int, output: Any = "3") -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": f"c{number}", "output": output}


def said(role: str, text: Any) -> dict[str, Any]:
    return {"role": role, "content": text}


def test_what_an_assistant_does_in_one_turn_is_one_message():
    turn = [said("user", "Go"), thinking("Hm. "), thinking("So."), said("assistant", "I add."), call(1), call(2)]
    user, assistant, *results = messages([*turn, result(1), result(2), said("assistant", "3 and 3.")])
    assert user == said("user", "Go")
    assert assistant["reasoning_content"] == "Hm. So." and assistant["content"] == "I add."
    assert [one["id"] for one in assistant["tool_calls"]] == ["c1", "c2"]
    assert results == [
        {"role": "tool", "tool_call_id": "c1", "content": "3"}, {"role": "tool", "tool_call_id": "c2", "content": "3"},
        said("assistant", "3 and 3."),
    ]  # fmt: skip


def test_a_call_alone_has_no_content_and_thinking_alone_an_empty_one():
    assert messages([call(1)])[0]["content"] is None
    assert messages([thinking("Hm.")]) == [{**said("assistant", ""), "reasoning_content": "Hm."}]


def test_text_after_calls_and_a_second_text_are_messages_of_their_own():
    found = messages([call(1), said("assistant", "a"), said("assistant", "b"), thinking("x"), said("assistant", "c")])
    assert [one["content"] for one in found] == [None, "a", "b", "c"]
    assert [one.get("reasoning_content") for one in found] == [None, None, None, "x"]


def test_developers_have_the_role_that_the_template_knows():
    items = [said("developer", "Be brief."), said("user", "Hi")]
    assert messages(items)[0]["role"] == "system" and messages(items, "developer")[0]["role"] == "developer"


def test_parts_are_kept_apart_and_a_refusal_is_text():
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    assert messages([said("user", parts)])[0]["content"] == [{"type": "text", "text": text} for text in "ab"]
    assert messages([said("assistant", [{"type": "refusal", "refusal": "No."}])])[0]["content"] == "No."
    assert messages([result(1, [{"type": "input_text", "text": "x"}])])[0]["content"] == "x"


def test_an_item_keeps_its_id_and_gets_one_where_it_has_none():
    items = read_items([{**said("user", "a"), "id": "msg_own"}, call(1), result(1), thinking("x")], Warnings())
    assert items[0]["id"] == "msg_own"
    assert [item["id"].partition("_")[0] for item in items] == ["msg", "fc", "fco", "rs"]
    assert read_items(items, Warnings()) == items, "an item that was read is read as itself"


def test_what_is_not_used_is_named():
    warnings = Warnings()
    read_items([{**said("user", "a"), "phase": "commentary", "status": "completed", "name": None}], warnings)
    assert warnings.texts == ["input[0].phase has no effect"]


@pytest.mark.parametrize(
    ("item", "words"),
    [
        (call(1, "{"), "input[0].arguments"),
        (call(1, "[1]"), "input[0].arguments"),
        ({**call(1), "call_id": ""}, "input[0].call_id"),
        ({"type": "function_call", "call_id": "c"}, "input[0]"),
        (said("robot", "x"), "robot"),
        (said("user", 5), "input[0]"),
        (said("user", [{"type": "input_text"}]), "input[0].content[0].text"),
        ({**said("user", "x"), "id": 7}, "input[0].id"),
    ],
    ids=["broken arguments", "a list", "no call", "no name", "role", "content", "no text", "id"],
)
def test_what_is_malformed_is_named_by_its_place(item, words):
    with pytest.raises(ValidationError) as caught:
        read_items([item], Warnings())
    assert words in str(caught.value) and caught.value.field == "input"


@pytest.mark.parametrize("kind", ["input_image", "input_file", ["x"], None])
def test_what_is_no_text_is_refused_by_its_type(kind):
    with pytest.raises(UnsupportedError, match="type"):
        read_items([said("user", [{"type": kind}])], Warnings())


def translated(template: str, warnings: Warnings | None = None, **fields: Any) -> Any:
    request = ResponsesRequest(input="Hi", **fields)
    warnings = warnings or Warnings()
    check_request(request, warnings)
    return chat_request(request, read_items("Hi", warnings), template, warnings)


def test_effort_goes_to_templates_that_take_it():
    high = ReasoningConfig(effort="high")
    assert translated("{{ reasoning_effort }}", reasoning=high).chat_template_kwargs == {"reasoning_effort": "high"}
    own = {"reasoning_effort": "low"}
    assert translated("{{ reasoning_effort }}", reasoning=high, chat_template_kwargs=own).chat_template_kwargs == own
    for effort, is_on in (("none", False), ("medium", True)):
        chat = translated("{{ enable_thinking }}", reasoning=ReasoningConfig(effort=effort))
        assert chat.chat_template_kwargs == {"enable_thinking": is_on}
    warnings = Warnings()
    assert translated("plain", warnings, reasoning=high).chat_template_kwargs is None
    assert "reasoning.effort has no effect" in warnings.texts[0]


def test_tools_and_their_choice_are_those_of_a_chat():
    tools = [{"type": "function", "name": name, "parameters": {}, "strict": None} for name in ("add", "sub")]
    chat = translated("", tools=tools, tool_choice={"type": "function", "name": "add"})
    assert chat.tools[0] == {"type": "function", "function": {"name": "add", "parameters": {}}}
    assert chat.tool_choice == {"type": "function", "function": {"name": "add"}}
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "sub"}]}
    chat = translated("", tools=tools, tool_choice=allowed)
    assert len(chat.tools) == 2, "the prompt is that of every choice"
    assert chat.tool_choice["allowed_tools"]["tools"] == [{"type": "function", "function": {"name": "sub"}}]
    assert chat.tool_choice["allowed_tools"]["mode"] == "required"
    chat = translated("", tools=[], tool_choice="auto")
    assert chat.tools is None and chat.tool_choice is None


def test_instructions_come_first():
    assert translated("", instructions="Be brief.").messages[0] == said("system", "Be brief.")
    assert translated("developer", instructions="Be brief.").messages[0]["role"] == "developer"
