"""The same requests through the other APIs: how they are asked, and what their answers and streams say."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.matrix.answers import RefusedError
from tests.robustness.http_streams import Exchange

Body = dict[str, Any]
MESSAGES_REASONS = {"stop": "end_turn", "tool_calls": "tool_use", "length": "max_tokens"}
RESPONSES_STATUS = {"stop": "completed", "tool_calls": "completed", "length": "incomplete"}
DATA = re.compile(rb"^data: (.*)$", re.MULTILINE)


@dataclass
class Said:
    """What an answer says, in any API; arguments as values.

    Attributes:
        end: the API's own word for why it ended.
    """

    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, Any]] = field(default_factory=list)
    end: str | None = None


def messages_body(chat: Body) -> Body:
    """For /v1/messages."""
    body = _moved_form(chat)
    system = [one["content"] for one in body["messages"] if one["role"] == "system"]
    body["messages"] = [one for one in body["messages"] if one["role"] != "system"]
    if system:
        body["system"] = system[0]
    if "tools" in body:
        functions = [tool["function"] for tool in body["tools"]]
        body["tools"] = [
            {"name": one["name"], "description": one["description"], "input_schema": one["parameters"]}
            for one in functions
        ]
    choice = body.get("tool_choice")
    if choice is not None:
        named = {"type": "tool", "name": choice["function"]["name"]} if isinstance(choice, dict) else None
        body["tool_choice"] = named or {"type": "any"}
    return body


def responses_body(chat: Body) -> Body:
    """For /v1/responses."""
    body = {**_moved_form(chat), "store": False}
    body["input"] = body.pop("messages")
    body["max_output_tokens"] = body.pop("max_tokens")
    if "tools" in body:
        body["tools"] = [{"type": "function", **tool["function"]} for tool in body["tools"]]
    if isinstance(body.get("tool_choice"), dict):
        body["tool_choice"] = {"type": "function", "name": body["tool_choice"]["function"]["name"]}
    return body


def _moved_form(chat: Body) -> Body:
    """`response_format` as `structured_outputs`, which all APIs have."""
    body = dict(chat)
    form = body.pop("response_format", None)
    if form is not None:
        is_tag = form["type"] == "structural_tag"
        body["structured_outputs"] = {"structural_tag": form} if is_tag else {"json_object": True}
    return body


def message_said(message: Body) -> Said:
    """What a whole message of /v1/messages says."""
    said = Said(end=message["stop_reason"])
    for block in message["content"]:
        if block["type"] == "tool_use":
            said.calls.append((block["name"], block["input"]))
        else:
            said.content += block.get("text", "")
            said.reasoning += block.get("thinking", "")
    return said


def messages_stream_said(events: list[Body]) -> Said:
    """What the events of /v1/messages come to."""
    said = Said()
    parts: list[tuple[str, list[str]]] = []
    for event in events:
        block, delta = event.get("content_block", {}), event.get("delta", {})
        if block.get("type") == "tool_use":
            parts.append((block["name"], []))
        said.content += block.get("text", "") + delta.get("text", "")
        said.reasoning += block.get("thinking", "") + delta.get("thinking", "")
        if "partial_json" in delta:
            parts[-1][1].append(delta["partial_json"])
        said.end = delta.get("stop_reason", said.end)
    assert events[-1]["type"] == "message_stop"
    said.calls = [(name, json.loads("".join(texts) or "{}")) for name, texts in parts]
    return said


def response_said(response: Body) -> Said:
    """What a whole response of /v1/responses says."""
    said = Said(end=response["status"])
    for item in response["output"]:
        if item["type"] == "function_call":
            said.calls.append((item["name"], json.loads(item["arguments"])))
        else:
            text = "".join(part["text"] for part in item["content"] or ())
            said.content += text if item["type"] == "message" else ""
            said.reasoning += text if item["type"] == "reasoning" else ""
    return said


def responses_stream_said(events: list[Body]) -> Said:
    """What the events of /v1/responses come to, which is what the response in the last one says."""
    said = Said()
    calls: list[list[str]] = []
    for event in events:
        kind = event["type"]
        if kind == "response.output_item.added" and event["item"]["type"] == "function_call":
            calls.append([event["item"]["name"], event["item"]["arguments"]])
        elif kind == "response.function_call_arguments.delta":
            calls[-1][1] += event["delta"]
        elif kind == "response.output_text.delta":
            said.content += event["delta"]
        elif kind == "response.reasoning_text.delta":
            said.reasoning += event["delta"]
    said.calls = [(name, json.loads(arguments)) for name, arguments in calls]
    said.end = events[-1]["response"]["status"]
    assert response_said(events[-1]["response"]) == said
    return said


@dataclass(frozen=True)
class Api:
    """An API.

    Attributes:
        body: the request of a chat, as this API has it.
        whole, streamed: what is said by an answer, and by the events of a stream.
        ends: the word for each `finish_reason` of a chat.
    """

    path: str
    body: Callable[[Body], Body]
    whole: Callable[[Body], Said]
    streamed: Callable[[list[Body]], Said]
    ends: dict[str, str]

    def read(self, exchange: Exchange) -> Said:
        """What came back."""
        if exchange.status != 200:
            raise RefusedError(exchange.status, json.loads(exchange.body)["error"])
        if not exchange.headers["content-type"].startswith("text/event-stream"):
            return self.whole(json.loads(exchange.body))
        assert exchange.is_complete
        return self.streamed([json.loads(one) for one in DATA.findall(exchange.body) if one != b"[DONE]"])


MESSAGES = Api("/v1/messages", messages_body, message_said, messages_stream_said, MESSAGES_REASONS)
RESPONSES = Api("/v1/responses", responses_body, response_said, responses_stream_said, RESPONSES_STATUS)
