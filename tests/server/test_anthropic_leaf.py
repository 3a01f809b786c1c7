"""The embedded model behind /v1/messages: agents finish tasks, and a conversation's turns find each other's pages."""

from __future__ import annotations

from typing import Any

import anthropic
import jsonschema
import pydantic
import pytest

from tests.server.anthropic_clients import TOOLS, client, run_agent
from tests.server.test_leaf import leaf

__all__ = ["leaf"]
GREEDY = {"temperature": 0}
ASKED: dict[str, Any] = {"model": "leaf", "max_tokens": 40, "extra_body": GREEDY}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_an_agent_finishes_tasks_with_the_tools_it_is_offered(leaf, stream):
    used, answer = run_agent(leaf, "What is the weather in Paris?", stream=stream, extra_body=GREEDY)
    assert used == ["get_weather"] and answer == "The weather in Paris is sunny."
    used, answer = run_agent(leaf, "Add 123 and 456.", stream=stream, extra_body=GREEDY)
    assert used == ["add"] and "579" in answer


def test_a_second_turn_reads_the_first_from_the_cache_and_its_count_is_exact(leaf):
    messages: list[Any] = [{"role": "user", "content": "What is 27 + 58? " * 12}]
    with client(leaf) as own:
        first = own.messages.create(**ASKED, messages=messages)
        messages += [
            {"role": "assistant", "content": first.content},
            {"role": "user", "content": [{"type": "text", "text": "And 12 + 7?"}]},
        ]
        counted = own.messages.count_tokens(model="leaf", messages=messages).input_tokens
        with own.messages.stream(**ASKED, messages=messages) as stream:
            usage = stream.get_final_message().usage
        repeated = own.messages.create(**ASKED, messages=messages).usage
    block = leaf.engine.config.cache.block_size
    before = first.usage.input_tokens + first.usage.cache_read_input_tokens
    assert usage.cache_read_input_tokens >= before // block * block > 0
    for one in (usage, repeated):
        assert one.input_tokens + one.cache_read_input_tokens + one.cache_creation_input_tokens == counted
    assert repeated.cache_read_input_tokens >= counted - 1 - block


def test_a_seeded_message_is_the_chats_answer(leaf):
    question: list[Any] = [{"role": "user", "content": "What is 27 + 58?"}]
    with client(leaf) as own, leaf.client() as chats:
        message = own.messages.create(
            model="leaf", max_tokens=12, messages=question, extra_body={"temperature": 1.0, "seed": 5}
        )
        chat = chats.chat.completions.create(model="leaf", max_tokens=12, messages=question, temperature=1.0, seed=5)
    text = "".join(block.text for block in message.content if isinstance(block, anthropic.types.TextBlock))
    assert text == chat.choices[0].message.content


class Person(pydantic.BaseModel):
    name: str
    age: int


def test_an_answer_of_a_schema_is_parsed_by_the_client(leaf):
    question: list[Any] = [{"role": "user", "content": "Anna is 7 years old. Give her name and age as JSON."}]
    with client(leaf) as own:
        message = own.messages.parse(**ASKED, messages=question, output_format=Person)
        with own.messages.stream(**ASKED, messages=question, output_format=Person) as stream:
            streamed = stream.get_final_message()
    assert isinstance(message.parsed_output, Person) and message.parsed_output == streamed.parsed_output


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_tool_that_must_be_called_is_called(leaf, stream):
    asked: dict[str, Any] = {
        "model": "leaf", "max_tokens": 100, "tools": TOOLS, "extra_body": {"temperature": 1.0, "seed": 3},
        "messages": [{"role": "user", "content": "Tell me a story."}],
    }  # fmt: skip
    choices: list[Any] = [{"type": "any"}, {"type": "tool", "name": "add", "disable_parallel_tool_use": True}]
    with client(leaf) as own:
        for choice in choices:
            if stream:
                with own.messages.stream(**asked, tool_choice=choice) as events:
                    message: Any = events.get_final_message()
            else:
                message = own.messages.create(**asked, tool_choice=choice)
            calls = [block for block in message.content if block.type == "tool_use"]
            assert len(calls) >= 1 and message.stop_reason in ("tool_use", "max_tokens")
            for call in calls:
                schema = next(tool["input_schema"] for tool in TOOLS if tool["name"] == call.name)
                jsonschema.validate(call.input, schema)
        assert [call.name for call in calls] == ["add"] and message.content == calls
