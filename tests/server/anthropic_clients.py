"""Anthropic's own client at a `RunningServer`, and what tests of the Messages API ask and compare."""

from __future__ import annotations

import json
from typing import Any

import anthropic

from tests.server.servers import RunningServer

HELLO = [{"role": "user", "content": "Hello"}]
WEATHER: dict[str, Any] = {
    "name": "get_weather",
    "description": "Get the weather of a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
ADDER: dict[str, Any] = {
    "name": "add",
    "description": "Add two numbers",
    "input_schema": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
    },
}
TOOLS = [WEATHER, ADDER]
ASKED: dict[str, Any] = {"model": "leaf", "max_tokens": 200, "messages": HELLO, "tools": TOOLS}


def client(server: RunningServer, **options: Any) -> anthropic.Anthropic:
    return anthropic.Anthropic(**{"base_url": server.url, "api_key": "none", "max_retries": 0, **options})


def ask(server: RunningServer, text: str, **fields: Any) -> Any:
    """The whole message when the model writes `text`."""
    server.engine.write = lambda prompt, seed: text
    with client(server) as own:
        return own.messages.create(**{**ASKED, **fields})


def ask_streamed(server: RunningServer, text: str, **fields: Any) -> Any:
    """The message that the client puts together of a stream."""
    server.engine.write = lambda prompt, seed: text
    with client(server) as own, own.messages.stream(**{**ASKED, **fields}) as stream:
        return stream.get_final_message()


def raw_events(server: RunningServer, text: str, **fields: Any) -> list[Any]:
    """The events of a stream."""
    server.engine.write = lambda prompt, seed: text
    with client(server) as own:
        return list(own.messages.create(**{**ASKED, "stream": True, **fields}))


def without_ids(message: Any) -> dict[str, Any]:
    """What of a message does not differ from run to run."""
    shown: dict[str, Any] = message.model_dump(exclude_none=True)
    assert shown.pop("id").startswith("msg_")
    for block in shown["content"]:
        block.pop("parsed_output", None)
        if block["type"] == "tool_use":
            assert block.pop("id").startswith("toolu_")
    return shown


def run_agent(server: RunningServer, task: str, *, stream: bool, **fields: Any) -> tuple[list[str], str]:
    """Answer `task`, running the tools that are called; (their names, the last answer)."""
    messages: list[Any] = [{"role": "user", "content": task}]
    used: list[str] = []
    with client(server) as own:
        for _ in range(6):
            asked: dict[str, Any] = {**ASKED, "messages": messages, **fields}
            if stream:
                with own.messages.stream(**asked) as events:
                    message: Any = events.get_final_message()
            else:
                message = own.messages.create(**asked)
            messages.append({"role": "assistant", "content": message.content})
            if message.stop_reason != "tool_use":
                return used, "".join(block.text for block in message.content if block.type == "text")
            calls = [block for block in message.content if block.type == "tool_use"]
            used += [call.name for call in calls]
            messages.append({"role": "user", "content": [result_of(call) for call in calls]})
    raise AssertionError("the task was never finished")


def result_of(call: Any) -> dict[str, Any]:
    """The tool_result of a call."""
    result = {"sum": call.input["a"] + call.input["b"]} if call.name == "add" else {"weather": "sunny"}
    return {"type": "tool_result", "tool_use_id": call.id, "content": json.dumps(result)}
