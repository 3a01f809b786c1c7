"""Agents on OpenAI's own client: tools until the task is finished, answers and arguments as pydantic models."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from openai.types.chat import ParsedChatCompletion
from pydantic import BaseModel

from quire.cli.demo_tools import demo_tools
from quire.config.build import build_config
from quire.engine.llm_engine import LLMEngine
from tests.server.engines import SteppedEngine, WritingEngine
from tests.server.servers import RunningServer
from tests.server.test_tools import ADD, PARIS
from tests.structured.libraries import needs_libraries

WEATHER = [{"role": "user", "content": "What is the weather in Paris?"}]


class Order(BaseModel):
    customer: str
    quantity: int
    day: Literal["Monday", "Tuesday", "Wednesday"]


class GetWeather(BaseModel):
    """Get the weather of a city"""

    city: str


class Add(BaseModel):
    """Add two numbers"""

    a: int
    b: int


TOOLS: list[Any] = [
    openai.pydantic_function_tool(GetWeather, name="get_weather"),
    openai.pydantic_function_tool(Add, name="add"),
]
ORDER: dict[str, Any] = {
    "model": "leaf", "temperature": 0, "max_tokens": 150, "response_format": Order,
    "messages": [{"role": "user", "content": "Extract customer, quantity and day as JSON: Please send 15 baskets to "
                                             "Iris on Tuesday."}],
}  # fmt: skip


@pytest.fixture(scope="module")
def leaf() -> Iterator[RunningServer]:
    config = build_config(model="leaf", num_gpu_blocks_override=256, packing_cache=False)
    stepped = SteppedEngine(LLMEngine.from_config(config))
    with RunningServer(stepped) as server:
        yield server
    stepped.shutdown()


@pytest.fixture(scope="module")
def writer() -> Iterator[RunningServer]:
    with RunningServer(WritingEngine(), reasoning_parser="think") as server:
        yield server


def complete(client: openai.OpenAI, *, stream: bool, **fields: Any) -> tuple[ParsedChatCompletion[Any], list[Any]]:
    """(the completion with its parsed parts, the events of its stream)."""
    if not stream:
        return client.chat.completions.parse(**fields), []
    with client.chat.completions.stream(**fields) as events:
        seen = list(events)
        return events.get_final_completion(), seen


def said(completion: Any) -> dict[str, Any]:
    """A completion without what is new in each, and without what the prefix cache had."""
    fields = completion.model_dump(exclude_none=True)
    fields["usage"].pop("prompt_tokens_details")
    for choice in fields["choices"]:
        for call in choice["message"].get("tool_calls") or ():
            del call["id"]
            call.pop("index", None)
    fields.pop("prompt_logprobs", None)
    return {name: fields[name] for name in ("model", "choices", "usage") if name in fields}


@needs_libraries
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_an_answer_is_the_pydantic_model_that_was_asked_for(leaf, stream):
    with leaf.client() as client:
        completion, events = complete(client, stream=stream, **ORDER)
    order = completion.choices[0].message.parsed
    assert order == Order(customer="Iris", quantity=15, day="Tuesday")
    if stream:
        text = "".join(event.delta for event in events if event.type == "content.delta")
        (done,) = [event for event in events if event.type == "content.done"]
        assert text == completion.choices[0].message.content == done.content and done.parsed == order
        snapshots = [event.snapshot for event in events if event.type == "content.delta"]
        assert snapshots[-1] == text and all(b.startswith(a) for a, b in zip(snapshots, snapshots[1:]))


@needs_libraries
def test_an_answer_that_is_cut_is_an_error_of_the_clients_and_not_half_a_model(leaf):
    with leaf.client() as client, pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(**{**ORDER, "max_tokens": 5})


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_arguments_of_calls_are_the_pydantic_models_of_their_tools(leaf, stream):
    with leaf.client() as client:
        completion, events = complete(
            client, stream=stream, model="leaf", messages=WEATHER, tools=TOOLS, temperature=0, max_tokens=100
        )
    (call,) = completion.choices[0].message.tool_calls
    assert call.function.parsed_arguments == GetWeather(city="Paris")
    assert completion.choices[0].finish_reason == "tool_calls"
    if stream:
        parts = [event for event in events if event.type == "tool_calls.function.arguments.delta"]
        (done,) = [event for event in events if event.type == "tool_calls.function.arguments.done"]
        assert "".join(part.arguments_delta for part in parts) == call.function.arguments == done.arguments
        assert done.parsed_arguments == GetWeather(city="Paris") and done.name == "get_weather"


@pytest.mark.parametrize(
    "text",
    ["Hello.", PARIS, f"Look: {PARIS}", f"{PARIS}\n{ADD}", f"<think>Hm.</think>{ADD}", "<think>Hm.</think>No."],
    ids=["text", "call", "text and call", "two calls", "thinking and call", "thinking and text"],
)
def test_what_the_streaming_helper_adds_up_is_the_whole_answer(writer, text):
    writer.engine.write = lambda prompt, seed: text
    fields: dict[str, Any] = {"model": "leaf", "messages": WEATHER, "tools": TOOLS, "max_tokens": 200}
    fields["stream_options"] = {"include_usage": True}
    with writer.client() as client:
        streamed, _ = complete(client, stream=True, **fields)
        del fields["stream_options"]
        whole, _ = complete(client, stream=False, **fields)
    for completion in (streamed, whole):
        completion.choices[0].message.content = completion.choices[0].message.content or ""
    ours, theirs = said(streamed), said(whole)
    for one in (ours, theirs):
        one["choices"][0]["message"].setdefault("tool_calls", [])
    assert ours == theirs


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_an_agent_on_the_parse_helpers_finishes_a_task_with_two_tools(writer, stream):
    def write(prompt: str, seed: int) -> str:
        if '{"sum": 3}' in prompt:
            return "Sunny, and 3."
        return f"<think>The sum.</think>Now the sum.\n{ADD}" if "sunny" in prompt else PARIS

    writer.engine.write = write
    messages: list[Any] = [{"role": "user", "content": "Weather and sum"}]
    used: list[BaseModel] = []
    with writer.client() as client:
        for _ in range(4):
            completion, _ = complete(
                client, stream=stream, model="leaf", messages=messages, tools=TOOLS, max_tokens=200
            )
            message = completion.choices[0].message
            if completion.choices[0].finish_reason != "tool_calls":
                break
            messages.append(message)
            for call in message.tool_calls or ():
                arguments = call.function.parsed_arguments
                assert isinstance(arguments, BaseModel)
                used.append(arguments)
                result = {"sum": arguments.a + arguments.b} if isinstance(arguments, Add) else {"weather": "sunny"}
                messages.append({"role": "tool", "tool_call_id": call.id, "content": json.dumps(result)})
    assert used == [GetWeather(city="Paris"), Add(a=1, b=2)]
    assert message.content == "Sunny, and 3."


def test_leaf_finishes_an_arithmetic_task_with_a_calculator(leaf):
    box = demo_tools()
    messages: list[Any] = [{"role": "user", "content": "What is 123 + 456?"}]
    used = 0
    with leaf.client() as client:
        for _ in range(4):
            choice = client.chat.completions.create(
                model="leaf",
                messages=messages,
                tools=box.schemas,
                temperature=0,
                max_tokens=100,  # type: ignore[arg-type]
            ).choices[0]
            messages.append(choice.message)
            if choice.finish_reason != "tool_calls":
                break
            for call in choice.message.tool_calls or ():
                used += 1
                result = box.call(call.function.name, call.function.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    assert used == 1 and "579" in choice.message.content
