"""Tools of every type that responses have: namespaces, custom tools, and those that run on OpenAI's servers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from quire.errors import ValidationError
from quire.server.api.responses.tools import origins_of
from tests.server.engines import WritingEngine
from tests.server.servers import RunningServer

PLACE = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin Patch"'}
TOOLS: list[Any] = [
    {"type": "function", "name": "shell", "description": "Run it", "parameters": PLACE, "strict": False},
    {
        "type": "namespace",
        "name": "agents",
        "description": "Other agents",
        "tools": [
            {"type": "function", "name": "spawn", "description": "Start one", "parameters": PLACE},
            {"type": "custom", "name": "tell", "description": "Write to one"},
        ],
    },
    {"type": "custom", "name": "apply_patch", "description": "Change files", "format": GRAMMAR},
    {"type": "web_search", "external_web_access": False},
]
SPAWN = '<tool_call>\n{"name": "agents__spawn", "arguments": {"city": "Oslo"}}\n</tool_call>'
PATCH_TEXT = '*** Begin Patch\n+ "a"\n'
PATCH = f"<tool_call>\n{json.dumps({'name': 'apply_patch', 'arguments': {'input': PATCH_TEXT}})}\n</tool_call>"
TELL = '<tool_call>\n{"name": "agents__tell", "arguments": {"input": "Hi"}}\n</tool_call>'


@pytest.fixture(scope="module")
def writer() -> Iterator[RunningServer]:
    with RunningServer(WritingEngine()) as running:
        yield running


def ask(server: RunningServer, text: str, items: Any = "Go", **fields: Any) -> Any:
    server.engine.write = lambda prompt, seed: text
    with server.client() as client:
        answer = client.responses.create(**{"model": "leaf", "input": items, "tools": TOOLS, **fields})
        return list(answer) if fields.get("stream") else answer


def prompt_text(server: RunningServer) -> str:
    text: str = server.engine.tokenizer.decode(server.engine.prompts[-1], skip_special_tokens=False)
    return text


def test_the_model_is_shown_functions_and_what_is_left_out_is_said(writer):
    answer = ask(writer, "Fine.")
    assert answer.status == "completed" and [tool.type for tool in answer.tools] == [tool["type"] for tool in TOOLS]
    assert answer.warnings == [
        "tools[2].format: the grammar is described to the model but not enforced",
        "tools[3]: web_search is ignored: this server does not run tools",
    ]
    shown = prompt_text(writer)
    for text in ('"agents__spawn"', '"Other agents\\nStart one"', '"apply_patch"', "*** Begin Patch"):
        assert text in shown
    assert "web_search" not in shown


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (SPAWN, {"type": "function_call", "name": "spawn", "namespace": "agents", "arguments": '{"city": "Oslo"}'}),
        (PATCH, {"type": "custom_tool_call", "name": "apply_patch", "input": PATCH_TEXT}),
        (TELL, {"type": "custom_tool_call", "name": "tell", "namespace": "agents", "input": "Hi"}),
    ],
    ids=["namespace", "custom", "custom in a namespace"],
)
def test_calls_come_back_as_the_tools_they_are_of(writer, text, expected, is_stream):
    answer = ask(writer, text, stream=is_stream)
    if is_stream:
        events = answer
        kinds = [event.type for event in events]
        answer = events[-1].response
        assert ("response.custom_tool_call_input.done" in kinds) == (expected["type"] == "custom_tool_call")
        if "input" in expected:
            parts = [event.delta for event in events if event.type == "response.custom_tool_call_input.delta"]
            assert "".join(parts) == expected["input"]
        added = next(event.item for event in events if event.type == "response.output_item.added")
        assert (added.type, added.name) == (expected["type"], expected["name"])
    (item,) = answer.model_dump(exclude_none=True)["output"]
    assert {name: item.get(name) for name in expected} == expected and item["call_id"].startswith("call_")


def test_tools_may_come_among_the_items(writer):
    items = [{"type": "additional_tools", "role": "developer", "tools": TOOLS[1:]}, {"role": "user", "content": "Go"}]
    answer = ask(writer, TELL, items, tools=TOOLS[:1])
    assert (answer.output[0].type, answer.output[0].name) == ("custom_tool_call", "tell")
    assert [tool.type for tool in answer.tools] == [tool["type"] for tool in TOOLS]
    among = prompt_text(writer)
    ask(writer, TELL, "Go")
    assert prompt_text(writer) == among
    for wrong in (None, "x", [5]):
        with pytest.raises(openai.BadRequestError, match=r"input\[0\]\.tools"):
            ask(writer, TELL, [{"type": "additional_tools", "tools": wrong}, items[1]])


@pytest.mark.parametrize(("text", "output"), [(SPAWN, "function_call_output"), (PATCH, "custom_tool_call_output")])
def test_calls_and_their_outputs_go_back_to_the_model_as_it_wrote_them(writer, text, output):
    first = ask(writer, text)
    result = {"type": output, "call_id": first.output[0].call_id, "output": "done"}
    items = [{"role": "user", "content": "Go"}, *first.output, result]
    assert ask(writer, "Fine.", items, store=False).output_text == "Fine."
    replayed = prompt_text(writer)
    assert text in replayed and "<tool_response>\ndone\n</tool_response>" in replayed
    kept = ask(writer, "Fine.", [result], previous_response_id=first.id)
    assert kept.output_text == "Fine." and prompt_text(writer) == replayed


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "custom", "name": "apply_patch"},
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "custom", "name": "apply_patch"}]},
    ],
    ids=["named", "allowed"],
)
def test_a_custom_tool_can_be_chosen(writer, choice):
    answer = ask(writer, PATCH, tool_choice=choice)
    assert answer.output[0].input == PATCH_TEXT and answer.tool_choice.type == choice["type"]


def test_an_input_that_the_limit_cuts_is_shown_as_it_was_written(writer):
    answer = ask(writer, PATCH, max_output_tokens=25)
    (item,) = answer.output
    assert answer.status == item.status == "incomplete" and item.type == "custom_tool_call"


def test_the_default_request_of_the_codex_command_line_is_taken(writer):
    writer.engine.write = lambda prompt, seed: "Done."
    functions = [
        {"type": "function", "name": f"tool_{i}", "description": "x", "strict": False, "parameters": PLACE}
        for i in range(7)
    ]
    body = {
        "model": "leaf",
        "instructions": "You are Codex.",
        "input": [
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hello"}]},
        ],
        "tools": [*functions, {**TOOLS[1], "name": "multi_agent_v1"}, TOOLS[3]],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": None,
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "0199",
        "client_metadata": {"x": "y"},
    }
    answer = httpx.post(f"{writer.url}/v1/responses", json=body, timeout=30)
    assert answer.status_code == 200 and "event: response.completed" in answer.text


def test_a_strict_server_refuses_what_it_leaves_out():
    with RunningServer(WritingEngine(), strict_requests=True) as server:
        with pytest.raises(openai.BadRequestError, match="web_search is ignored"):
            ask(server, "x", tools=TOOLS[3:])
        assert ask(server, "Fine.", tools=TOOLS[:2]).output_text == "Fine."


def test_two_tools_that_the_model_could_not_tell_apart_are_refused():
    with pytest.raises(ValidationError, match="duplicate tool name 'agents__spawn'"):
        origins_of([TOOLS[1], {"type": "function", "name": "agents__spawn"}])
