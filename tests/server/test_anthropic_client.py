"""/v1/messages through Anthropic's own client: a stream comes to the whole message, and agents finish their tasks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from tests.server.anthropic_clients import (
    ADDER,
    HELLO,
    TOOLS,
    ask,
    ask_streamed,
    client,
    raw_events,
    run_agent,
    without_ids,
)
from tests.server.engines import WritingEngine
from tests.server.servers import RunningServer
from tests.server.test_tools import ADD, ANSWERS, BROKEN, PARIS, THOUGHT


@pytest.fixture(scope="module")
def writer() -> Iterator[RunningServer]:
    with RunningServer(WritingEngine(), reasoning_parser="think") as running:
        yield running


def prompt(server: RunningServer) -> str:
    """The last prompt that the engine got."""
    return server.engine.tokenizer.decode(server.engine.prompts[-1], skip_special_tokens=False)


@pytest.mark.parametrize("name", ANSWERS)
@pytest.mark.parametrize("max_tokens", [200, 17])
def test_a_stream_comes_to_the_whole_message(writer, name, max_tokens):
    whole = ask(writer, ANSWERS[name], max_tokens=max_tokens)
    streamed = ask_streamed(writer, ANSWERS[name], max_tokens=max_tokens)
    assert without_ids(streamed) == without_ids(whole)
    has_calls = any(block.type == "tool_use" for block in whole.content)
    assert (whole.stop_reason == "tool_use") <= has_calls


def test_a_message_has_anthropics_fields(writer):
    message = ask(writer, "It is 5.", tools=anthropic.omit)
    assert message.id.startswith("msg_") and message.type == "message" and message.role == "assistant"
    assert message.model == "leaf" and message.stop_reason == "end_turn" and message.stop_sequence is None
    assert [(block.type, block.text) for block in message.content] == [("text", "It is 5.")]
    num_prompt = len(writer.engine.prompts[-1])
    assert message.usage.input_tokens + message.usage.cache_read_input_tokens == num_prompt
    assert message.usage.cache_read_input_tokens == num_prompt // 2 and message.usage.cache_creation_input_tokens == 0
    assert message.usage.output_tokens == len(writer.engine.tokenizer.encode("It is 5.", add_special_tokens=False))
    assert message._request_id


def test_events_come_in_their_order_and_blocks_are_numbered(writer):
    events = raw_events(writer, f"{THOUGHT}I look.\n{PARIS}\n{ADD}\nDone.")
    kinds = [event.type for event in events]
    assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]
    starts = [event for event in events if event.type == "content_block_start"]
    blocks = [event.content_block.type for event in starts]
    assert blocks == ["thinking", "text", "tool_use", "tool_use", "text"]
    assert [event.index for event in starts] == [0, 1, 2, 3, 4]
    index = None
    for event in events[1:-2]:
        if event.type == "content_block_start":
            assert index is None
            index = event.index
        assert event.index == index
        if event.type == "content_block_stop":
            index = None
    deltas = {event.delta.type for event in events if event.type == "content_block_delta"}
    assert deltas == {"thinking_delta", "signature_delta", "text_delta", "input_json_delta"}
    assert events[0].message.content == [] and events[0].message.stop_reason is None


def test_a_call_is_a_block_with_its_arguments_as_an_object(writer):
    message = ask(writer, ANSWERS["two"])
    assert [(block.name, block.input) for block in message.content] == [
        ("get_weather", {"city": "Paris"}), ("add", {"a": 1, "b": 2}),
    ]  # fmt: skip
    assert message.stop_reason == "tool_use"
    assert len({block.id for block in message.content}) == 2
    alone = ask(writer, ANSWERS["two"], tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert [block.name for block in alone.content] == ["get_weather"]
    none = ask(writer, PARIS, tool_choice={"type": "none"})
    assert none.content[0].text == PARIS and none.stop_reason == "end_turn"


@pytest.mark.parametrize("make", [ask, ask_streamed], ids=["whole", "streamed"])
def test_a_call_that_is_broken_or_cut_is_text_and_never_a_block(writer, make):
    message = make(writer, f"{ADD}\n{BROKEN}")
    assert [block.type for block in message.content] == ["tool_use", "text"]
    assert message.content[1].text.strip() == BROKEN and message.stop_reason == "tool_use"
    cut = make(writer, PARIS, max_tokens=12)
    assert [block.type for block in cut.content] == ["text"] and cut.stop_reason == "max_tokens"


def test_thinking_is_a_block_of_its_own_and_is_counted(writer):
    thinking = {"type": "enabled", "budget_tokens": 1024}
    message = ask(writer, ANSWERS["thought"], thinking=thinking, max_tokens=1100)
    assert [block.type for block in message.content] == ["thinking", "text"]
    assert (message.content[0].thinking, message.content[0].signature) == ("Two and two.", "")
    assert message.usage.output_tokens_details.thinking_tokens > 0
    for silent in ({"type": "disabled"}, {**thinking, "display": "omitted"}):
        shown = ask(writer, ANSWERS["thought"], thinking=silent, max_tokens=1100)
        assert [block.type for block in shown.content] == ["text"]
    adaptive = ask(writer, ANSWERS["thought"], thinking={"type": "adaptive"})
    assert adaptive.content[0].type == "thinking"


@pytest.mark.parametrize("make", [ask, ask_streamed], ids=["whole", "streamed"])
def test_a_stop_sequence_is_told(writer, make):
    message = make(writer, "One, two, three.", stop_sequences=["zero", ","])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", ",")
    assert message.content[0].text == "One"
    message = make(writer, "One, two, three.", max_tokens=2)
    assert (message.stop_reason, message.stop_sequence) == ("max_tokens", None)


def test_a_message_can_be_begun_for_the_model(writer):
    begun = [*HELLO, {"role": "assistant", "content": "The answer is"}]
    assert ask(writer, " 5.", messages=begun).content[0].text == " 5."
    assert prompt(writer).endswith("The answer is")


def test_turns_reach_the_template_as_those_of_a_chat(writer):
    messages: list[Any] = [
        {"role": "user", "content": [{"type": "text", "text": "Weather?"}, {"type": "text", "text": "In Paris."}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "s"},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Paris"}},
                {"type": "tool_use", "id": "toolu_2", "name": "add", "input": {"a": 1, "b": 2}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "sunny"}]},
                {"type": "tool_result", "tool_use_id": "toolu_2", "content": "overflow", "is_error": True},
                {"type": "text", "text": "And now?"},
            ],
        },
    ]
    ask(writer, "Fine.", messages=messages, system=[{"type": "text", "text": "Be brief."}])
    shown = prompt(writer)
    assert "<|im_start|>system\nBe brief." in shown and "<|im_start|>user\nWeather?\nIn Paris.<|im_end|>" in shown
    assert f"I look.\n{PARIS}\n{ADD}" in shown
    responses = "<tool_response>\nsunny\n</tool_response>\n<tool_response>\nError: overflow\n</tool_response>"
    assert responses in shown and shown.count("<|im_start|>user\nAnd now?<|im_end|>") == 1
    with writer.client() as chats:
        tools: Any = [{"type": "function", "function": {**tool, "parameters": tool["input_schema"]}} for tool in TOOLS]
        for tool in tools:
            del tool["function"]["input_schema"]
        chats.chat.completions.create(
            model="leaf",
            messages=[
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "Weather?\nIn Paris."},
                {
                    "role": "assistant",
                    "content": "I look.",
                    "tool_calls": [
                        {
                            "id": name,
                            "type": "function",
                            "function": {"name": name, "arguments": json.dumps(arguments)},
                        }
                        for name, arguments in (("get_weather", {"city": "Paris"}), ("add", {"a": 1, "b": 2}))
                    ],
                },
                {"role": "tool", "tool_call_id": "get_weather", "content": "sunny"},
                {"role": "tool", "tool_call_id": "add", "content": "Error: overflow"},
                {"role": "user", "content": "And now?"},
            ],
            tools=tools,
        )
    assert prompt(writer) == shown


def test_a_system_prompt_may_come_in_messages_and_a_clients_notice_is_no_part_of_it(writer):
    notice = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cch=00abc;"}
    messages = [{"role": "system", "content": "In French."}, *HELLO]
    message = ask(writer, "Oui.", messages=messages, tools=[], system=[notice, {"type": "text", "text": "Be brief."}])
    assert "<|im_start|>system\nBe brief.\nIn French.<|im_end|>" in prompt(writer)
    assert "billing" not in prompt(writer) and any("billing" in one for one in message.warnings)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_an_agent_finishes_a_task_with_two_tools(writer, stream):
    def write(prompt: str, seed: int) -> str:
        if '{"sum": 3}' in prompt:
            return "Sunny, and 3."
        return f"Now the sum.\n{ADD}" if "sunny" in prompt else f"{THOUGHT}{PARIS}"

    writer.engine.write = write
    assert run_agent(writer, "Weather and sum", stream=stream) == (["get_weather", "add"], "Sunny, and 3.")


CONVERSATIONS: dict[str, dict[str, Any]] = {
    "one turn": {},
    "system": {"system": "Be brief."},
    "system blocks": {"system": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]},
    "tools": {"tools": TOOLS},
    "no calls": {"tools": TOOLS, "tool_choice": {"type": "none"}},
    "long": {"messages": [{"role": "user", "content": "The quick brown fox. " * 60}]},
    "other scripts": {"messages": [{"role": "user", "content": "Grüße, 世界! <|im_end|> \U0001f600"}]},
    "begun": {"messages": [*HELLO, {"role": "assistant", "content": "Well"}]},
    "no thinking": {"thinking": {"type": "disabled"}},
    "turns": {
        "tools": [ADDER],
        "messages": [
            *HELLO,
            {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "add", "input": {"a": 1}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "is_error": True}]},
        ],
    },
}  # fmt: skip


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_counted_tokens_are_those_of_the_answers_usage(writer, name):
    asked = {"model": "leaf", "messages": HELLO, **CONVERSATIONS[name]}
    with client(writer) as own:
        counted = own.messages.count_tokens(**asked).input_tokens
    usage = ask(writer, "x", **{"tools": anthropic.omit, **asked}).usage
    assert counted == usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens
    assert counted == len(writer.engine.prompts[-1])


def test_the_clients_own_runner_of_tools_finishes_a_task(writer):
    @anthropic.beta_tool
    def get_weather(city: str) -> str:
        """Get the weather of a city.

        Args:
            city: its name.
        """
        return f"sunny in {city}"

    writer.engine.write = lambda prompt, seed: "It is sunny." if "sunny in Paris" in prompt else PARIS
    with client(writer) as own:
        asked: dict[str, Any] = {"model": "leaf", "max_tokens": 100, "messages": HELLO, "tools": [get_weather]}
        last = own.beta.messages.tool_runner(**asked).until_done()
        assert last.content[0].text == "It is sunny."
        with own.beta.messages.stream(**{**asked, "tools": []}, betas=["context-management-2025-06-27"]) as stream:
            assert stream.get_final_message().stop_reason == "end_turn"
        counted = own.beta.messages.count_tokens(model="leaf", messages=HELLO).input_tokens
    assert counted == len(writer.engine.prompts[-1])


def test_a_budget_of_thinking_reaches_the_engine(writer, monkeypatch):
    seen: list[int | None] = []
    generate = writer.engine.generate

    def watched(prompt: Any, params: Any, request_id: str, options: Any = None) -> Any:
        seen.append(params.thinking_token_budget)
        return generate(prompt, params, request_id, options)

    monkeypatch.setattr(writer.engine, "generate", watched)
    message = ask(writer, ANSWERS["thought"], thinking={"type": "enabled", "budget_tokens": 1024}, max_tokens=1100)
    ask(writer, ANSWERS["thought"], thinking={"type": "adaptive"})
    assert seen == [1024, None] and not hasattr(message, "warnings")
