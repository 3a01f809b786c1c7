"""Tool calls of chats, through OpenAI's own client: what a stream comes to is what the whole answer says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from quire.errors import ConfigError
from quire.server.chat.named_parsers import check_parsers
from tests.server.engines import WritingEngine
from tests.server.servers import RunningServer, server_config

HELLO = [{"role": "user", "content": "Hello"}]
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Get the weather of a city",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    },
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two numbers",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
                "required": ["a", "b"],
            },
        },
    },
]
PARIS = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
ADD = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
BROKEN = '<tool_call>\n{"name": "add", "arguments": {"a": 1, b: 2}}\n</tool_call>'
UNKNOWN = '<tool_call>\n{"name": "rm", "arguments": {}}\n</tool_call>'
THOUGHT = "<think>\nTwo and two.\n</think>\n\n"
ASKED: dict[str, Any] = {"model": "leaf", "messages": HELLO, "tools": TOOLS, "max_tokens": 200}
ANSWERS = {
    "plain": "It is 5 < 6.",
    "one": PARIS,
    "text first": f"I look.\n{PARIS}",
    "two": f"{PARIS}\n{ADD}",
    "broken": BROKEN,
    "unknown": UNKNOWN,
    "thought": f"{THOUGHT}Four.",
    "thought and call": f"{THOUGHT}{ADD}",
    "call in a thought": f"<think>{ADD}</think>No.",
}


@pytest.fixture(scope="module")
def tools() -> Iterator[RunningServer]:
    with RunningServer(WritingEngine(), reasoning_parser="think") as running:
        yield running


def named(name: str) -> Any:
    return {"type": "function", "function": {"name": name}}


def allowed(mode: str, *names: str) -> Any:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [named(name) for name in names]}}


def ask(server: RunningServer, text: str | dict[int, str], **fields: Any) -> Any:
    """The whole answer when the model writes `text` (or for each of n, its own)."""
    server.engine.write = lambda prompt, seed: text if isinstance(text, str) else text[seed]
    with server.client() as client:
        return client.chat.completions.create(**{**ASKED, **fields})


def chunks(server: RunningServer, text: str | dict[int, str], **fields: Any) -> Iterator[Any]:
    """The same as a stream."""
    server.engine.write = lambda prompt, seed: text if isinstance(text, str) else text[seed]
    with server.client() as client:
        yield from client.chat.completions.create(
            **{**ASKED, "stream": True, "stream_options": {"include_usage": True}, **fields}
        )


def streamed(server: RunningServer, text: str | dict[int, str], **fields: Any) -> tuple[dict[int, dict[str, Any]], Any]:
    """(what the deltas come to by answer, usage)."""
    answers: dict[int, dict[str, Any]] = {}
    usage = None
    for chunk in chunks(server, text, **fields):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            one = answers.setdefault(
                choice.index, {"content": "", "reasoning": "", "calls": [], "reason": None, "logprobs": []}
            )
            assert one["reason"] is None, "nothing follows the reason"
            one["reason"] = choice.finish_reason
            one["content"] += choice.delta.content or ""
            one["reasoning"] += getattr(choice.delta, "reasoning", None) or ""
            one["logprobs"] += choice.logprobs.content if choice.logprobs else []
            for part in choice.delta.tool_calls or []:
                if part.id is not None:
                    assert part.index == len(one["calls"]) and part.function.name and part.type == "function"
                    one["calls"].append([part.id, part.function.name, ""])
                else:
                    assert part.index == len(one["calls"]) - 1 and part.function.name is None
                one["calls"][-1][2] += part.function.arguments
    return answers, usage


def shown(choice: Any) -> dict[str, Any]:
    message = choice.message
    calls = [[call.function.name, call.function.arguments] for call in message.tool_calls or []]
    return {
        "content": message.content or "", "reasoning": getattr(message, "reasoning", None) or "", "calls": calls,
        "reason": choice.finish_reason, "logprobs": choice.logprobs.content if choice.logprobs else [],
    }  # fmt: skip


def without_ids(answer: dict[str, Any]) -> dict[str, Any]:
    ids = [call[0] for call in answer["calls"]]
    assert len(set(ids)) == len(ids) and all(one.startswith("call_") for one in ids)
    return {**answer, "calls": [call[1:] for call in answer["calls"]]}


@pytest.mark.parametrize("name", ANSWERS)
@pytest.mark.parametrize("max_tokens", [200, 17])
def test_a_stream_comes_to_the_whole_answer(tools, name, max_tokens):
    whole = ask(tools, ANSWERS[name], max_tokens=max_tokens, logprobs=True, top_logprobs=1)
    parts, usage = streamed(tools, ANSWERS[name], max_tokens=max_tokens, logprobs=True, top_logprobs=1)
    assert without_ids(parts[0]) == shown(whole.choices[0])
    assert usage == whole.usage
    assert len(parts[0]["logprobs"]) == usage.completion_tokens
    assert (parts[0]["reason"] == "tool_calls") <= bool(parts[0]["calls"])


def test_calls_are_in_the_message_and_not_in_the_content(tools):
    choice = ask(tools, ANSWERS["two"]).choices[0]
    assert shown(choice)["calls"] == [["get_weather", '{"city": "Paris"}'], ["add", '{"a": 1, "b": 2}']]
    assert choice.message.content is None and choice.finish_reason == "tool_calls"
    choice = ask(tools, ANSWERS["text first"]).choices[0]
    assert choice.message.content == "I look." and choice.finish_reason == "tool_calls"


def test_what_is_no_call_is_content_and_the_reason_stop(tools):
    for name in ("plain", "unknown"):
        choice = ask(tools, ANSWERS[name]).choices[0]
        assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (
            ANSWERS[name],
            None,
            "stop",
        )


def test_thinking_is_apart_and_its_tokens_are_counted(tools):
    answer = ask(tools, ANSWERS["thought and call"])
    assert answer.choices[0].message.reasoning == "Two and two." and answer.choices[0].message.content is None
    assert answer.choices[0].finish_reason == "tool_calls"
    inner = tools.engine.tokenizer.encode("\nTwo and two.\n", add_special_tokens=False)
    assert answer.usage.completion_tokens_details.reasoning_tokens == len(inner)
    hidden = ask(tools, ANSWERS["thought and call"], extra_body={"include_reasoning": False})
    assert hidden.choices[0].message.reasoning is None and hidden.usage == answer.usage
    parts, _ = streamed(tools, ANSWERS["thought and call"], extra_body={"include_reasoning": False})
    assert parts[0]["reasoning"] == "" and parts[0]["calls"]
    assert ask(tools, "Hi").usage.completion_tokens_details.reasoning_tokens == 0


def test_thinking_that_the_limit_cuts_is_no_content(tools):
    choice = ask(tools, ANSWERS["thought"], max_tokens=4).choices[0]
    assert choice.message.content is None and choice.finish_reason == "length"
    assert "Two and two.".startswith(choice.message.reasoning.strip())


def test_thinking_that_begins_in_the_prompt_is_found(tools):
    messages = [*HELLO, {"role": "assistant", "content": "<think>\nTwo"}]
    asked = {"messages": messages, "extra_body": {"continue_final_message": True}}
    assert ask(tools, " and two.\n</think>\nFour.", **asked).choices[0].message.reasoning == "and two."
    parts, _ = streamed(tools, " and two.\n</think>\nFour.", **asked)
    assert (parts[0]["reasoning"], parts[0]["content"]) == ("and two.", "Four.")


def test_a_call_that_the_limit_cuts_has_the_beginning_of_its_arguments(tools):
    num_tokens = len(tools.engine.tokenizer.encode(PARIS.partition("ris")[0], add_special_tokens=False))
    choice = ask(tools, PARIS, max_tokens=num_tokens).choices[0]
    assert choice.finish_reason == "length"
    assert '{"city": "Paris"}'.startswith(choice.message.tool_calls[0].function.arguments)


@pytest.mark.parametrize("choice", ["required", named("add")], ids=["required", "named"])
def test_a_forced_call_that_was_cut_before_its_name_is_no_content(tools, choice):
    (whole,) = ask(tools, ADD, tool_choice=choice, max_tokens=3).choices
    assert (whole.message.content, whole.message.tool_calls, whole.finish_reason) == ("", None, "length")
    parts, _ = streamed(tools, ADD, tool_choice=choice, max_tokens=3)
    assert (parts[0]["content"], parts[0]["calls"], parts[0]["reason"]) == ("", [], "length")


def test_each_of_n_answers_has_its_own_calls(tools):
    texts = {3: ANSWERS["two"], 4: ANSWERS["plain"], 5: ANSWERS["thought and call"]}
    whole = ask(tools, texts, n=3, seed=3)
    parts, usage = streamed(tools, texts, n=3, seed=3)
    assert [without_ids(parts[index]) for index in range(3)] == [shown(choice) for choice in whole.choices]
    assert [choice.finish_reason for choice in whole.choices] == ["tool_calls", "stop", "tool_calls"]
    assert usage == whole.usage


def test_without_parallel_tool_calls_only_the_first_is_told(tools):
    whole = ask(tools, ANSWERS["two"], parallel_tool_calls=False)
    parts, _ = streamed(tools, ANSWERS["two"], parallel_tool_calls=False)
    assert shown(whole.choices[0])["calls"] == without_ids(parts[0])["calls"] == [["get_weather", '{"city": "Paris"}']]


def test_a_stop_text_ends_a_call_as_the_limit_does(tools):
    whole = ask(tools, ANSWERS["two"], stop=["Par"])
    parts, _ = streamed(tools, ANSWERS["two"], stop=["Par"])
    assert without_ids(parts[0]) == shown(whole.choices[0])
    assert without_ids(parts[0])["calls"] == [["get_weather", '{"city": "']]


def test_usage_with_every_chunk_counts_the_thinking_so_far(tools):
    options = {"include_usage": True, "continuous_usage_stats": True}
    usages = [chunk.usage for chunk in chunks(tools, ANSWERS["thought"], stream_options=options)]
    counts = [usage.completion_tokens_details.reasoning_tokens for usage in usages]
    assert counts == sorted(counts) and usages[-1] == ask(tools, ANSWERS["thought"]).usage


def test_with_tool_choice_none_calls_are_content(tools):
    choice = ask(tools, PARIS, tool_choice="none").choices[0]
    assert choice.message.content == PARIS and choice.finish_reason == "stop"
    assert "get_weather" in tools.engine.tokenizer.decode(tools.engine.prompts[-1], skip_special_tokens=False)


def test_a_message_of_a_tool_and_the_call_before_it_reach_the_template(tools):
    call = ask(tools, PARIS).choices[0].message.model_dump(exclude_none=True)
    result = {"role": "tool", "tool_call_id": call["tool_calls"][0]["id"], "content": '{"weather": "sunny"}'}
    ask(tools, "Fine.", messages=[*HELLO, call, result])
    prompt = tools.engine.tokenizer.decode(tools.engine.prompts[-1], skip_special_tokens=False)
    assert PARIS in prompt and '<tool_response>\n{"weather": "sunny"}\n</tool_response>' in prompt


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "auto", "tools": openai.omit}, "tool_choice"),
        ({"tool_choice": "required", "tools": openai.omit}, "tool_choice"),
        ({"tool_choice": named("add"), "tools": openai.omit}, "tool_choice"),
        ({"tool_choice": named("ad")}, "tool_choice"),
        ({"tool_choice": "any"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "add"}}, "tool_choice"),
        ({"tool_choice": allowed("auto", "rm")}, "tool_choice"),
        ({"tool_choice": allowed("none", "add")}, "tool_choice"),
        ({"tool_choice": allowed("required")}, "tool_choice"),
        ({"tool_choice": "required", "extra_body": {"structured_outputs": {"regex": "a"}}}, "structured_outputs"),
        ({"extra_body": {"thinking_token_budget": -2}}, "thinking_token_budget"),
        ({"extra_body": {"thinking_token_budget": "5"}}, "thinking_token_budget"),
        ({"tools": []}, "tools"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": 5}}]}, "tools"),
    ],
    ids=[
        "auto without tools",
        "required without tools",
        "named without tools",
        "unknown tool",
        "unknown choice",
        "no function named",
        "unknown tool allowed",
        "unknown mode",
        "nothing allowed",
        "two forms",
        "negative budget",
        "budget as text",
        "no tools",
        "no function",
        "no schema",
    ],
)
def test_what_cannot_be_done_is_refused_by_name(tools, fields, param):
    with pytest.raises(openai.BadRequestError) as caught:
        ask(tools, "x", **fields)
    assert caught.value.param == param


def test_where_strict_has_no_effect_the_answer_says_so():
    strict = [{**TOOLS[0], "function": {**TOOLS[0]["function"], "strict": True}}]
    for settings in ({"tool_call_parser": "pythonic"}, {"tool_call_parser": "openai"}):
        with RunningServer(WritingEngine(), **settings) as server:
            assert any("strict" in one for one in ask(server, PARIS, tools=strict).warnings)


def test_two_functions_of_one_name_are_pointed_out(tools):
    found = ask(tools, PARIS, tools=[*TOOLS, TOOLS[0]]).warnings
    where = f"tools[{len(TOOLS)}].function.name"
    assert found == [f"{where} is that of tools[0], too: a call does not say which one is meant"]


def test_a_strict_function_whose_schema_cannot_be_followed_is_refused(tools):
    wrong = {"name": "f", "strict": True, "parameters": {"type": "object", "not": {"required": ["a"]}}}
    with pytest.raises(openai.BadRequestError, match="strict.*/not") as caught:
        ask(tools, PARIS, tools=[{"type": "function", "function": wrong}])
    assert caught.value.param == "tools"


REMOTE = {"type": "object", "properties": {"a": {"$ref": "http://127.0.0.1:9/a.json"}}}
RESPONSES_FORM = {"type": "function", "name": "f", "parameters": REMOTE}
MESSAGES_FORM = {"messages": HELLO, "max_tokens": 9, "tools": [{"name": "f", "input_schema": REMOTE}]}
FORCED: dict[str, tuple[str, Any]] = {
    "required": ("/v1/chat/completions", {"messages": HELLO, "tool_choice": "required"}),
    "named": ("/v1/chat/completions", {"messages": HELLO, "tool_choice": named("f")}),
    "allowed": ("/v1/chat/completions", {"messages": HELLO, "tool_choice": allowed("required", "f")}),
    "response": ("/v1/responses", {"input": "a", "tools": [RESPONSES_FORM], "tool_choice": "required"}),
    "response named": (
        "/v1/responses",
        {"input": "a", "tools": [RESPONSES_FORM], "tool_choice": {"type": "function", "name": "f"}},
    ),
    "response strict": ("/v1/responses", {"input": "a", "tools": [{**RESPONSES_FORM, "strict": True}]}),
    "message": ("/v1/messages", {**MESSAGES_FORM, "tool_choice": {"type": "any"}}),
    "message named": ("/v1/messages", {**MESSAGES_FORM, "tool_choice": {"type": "tool", "name": "f"}}),
}


@pytest.mark.parametrize("kind", FORCED)
def test_every_api_refuses_a_forced_call_by_a_schema_from_elsewhere(tools, kind):
    path, body = FORCED[kind]
    offered = [{"type": "function", "function": {"name": "f", "parameters": REMOTE}}]
    answer = httpx.post(tools.url + path, json={"tools": offered, **body})
    assert answer.status_code == 400, answer.text
    assert "tools f.function.parameters" in answer.text and "#/properties/a/$ref" in answer.text


def test_a_server_without_a_parser_refuses_tools_and_says_what_to_do():
    for settings in ({"tool_call_parser": "none"}, {"enable_auto_tool_choice": False}):
        with RunningServer(WritingEngine(), **settings) as server:
            with pytest.raises(openai.BadRequestError, match="--tool-call-parser") as caught:
                ask(server, PARIS)
            assert caught.value.param == "tools"
            assert ask(server, PARIS, tool_choice="none").choices[0].message.content == PARIS


def test_calls_can_be_forced_where_the_model_has_no_choice_of_its_own():
    with RunningServer(WritingEngine(), enable_auto_tool_choice=False) as server:
        assert ask(server, PARIS, tool_choice="required").choices[0].finish_reason == "tool_calls"
    for name in ("none", "pythonic"):
        with RunningServer(WritingEngine(), tool_call_parser=name) as server:
            with pytest.raises(openai.BadRequestError, match="--tool-call-parser") as caught:
                ask(server, PARIS, tool_choice="required")
            assert caught.value.param == ("tools" if name == "none" else "tool_choice")


def test_a_budget_needs_a_format_of_thinking():
    for settings in ({}, {"reasoning_parser": "openai_gptoss"}):
        with RunningServer(WritingEngine(), **settings) as server:
            with pytest.raises(openai.BadRequestError, match="--reasoning-parser") as caught:
                ask(server, "x", extra_body={"thinking_token_budget": 5})
            assert caught.value.param == "thinking_token_budget"
            assert ask(server, "x", extra_body={"thinking_token_budget": -1}).choices[0].message.content == "x"


def test_a_tool_that_is_not_allowed_is_shown_and_not_called(tools):
    choice = ask(tools, f"{PARIS}\n{ADD}", tool_choice=allowed("auto", "add")).choices[0]
    assert [call.function.name for call in choice.message.tool_calls] == ["add"] and choice.message.content == PARIS
    assert "get_weather" in tools.engine.tokenizer.decode(tools.engine.prompts[-1], skip_special_tokens=False)


def test_held_calls_are_whole_or_content():
    with RunningServer(WritingEngine(), hold_tool_calls=True) as server:
        for text in (BROKEN, f"{ADD}\n{BROKEN}"):
            whole, (parts, _) = ask(server, text), streamed(server, text)
            assert without_ids(parts[0]) == shown(whole.choices[0])
            assert shown(whole.choices[0])["content"].strip() == BROKEN
        assert without_ids(parts[0])["calls"] == [["add", '{"a": 1, "b": 2}']]


def test_an_id_that_the_model_gives_a_call_is_kept_unless_another_call_has_it():
    begin, arguments, end = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
    calls = [f'{begin}functions.add:{index}{arguments}{{"a": 1}}{end}' for index in (0, 1, 1)]
    with RunningServer(WritingEngine(), tool_call_parser="kimi_k2") as server:
        text = "".join(calls)
        whole = [call.id for call in ask(server, text).choices[0].message.tool_calls]
        parts = [call[0] for call in streamed(server, text)[0][0]["calls"]]
        for ids in (whole, parts):
            assert ids[:2] == ["functions.add:0", "functions.add:1"] and ids[2].startswith("call_")


def test_a_format_of_the_operators_own_is_read_from_a_file(tmp_path):
    path = tmp_path / "format.yaml"
    path.write_text("begin: 'CALL '\nend: ';'\npattern: '(?P<name>\\w+) (?P<arguments>.*)'\n")
    with RunningServer(WritingEngine(), tool_call_parser="pattern", tool_call_format=str(path)) as server:
        text = 'Ok. CALL add {"a": 1};'
        assert shown(ask(server, text).choices[0])["calls"] == [["add", '{"a": 1}']]
        assert without_ids(streamed(server, text)[0][0]) == shown(ask(server, text).choices[0])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"tool_call_parser": "hermse"}, "hermes"),
        ({"reasoning_parser": "deepseek_r2"}, "deepseek_r1"),
        ({"tool_call_parser": "pattern"}, "tool_call_format"),
        ({"tool_call_format": "x.yaml"}, "tool_call_parser=pattern"),
        ({"tool_call_parser": "pattern", "tool_call_format": "/nowhere/x.yaml"}, "cannot read"),
    ],
    ids=["parser", "reasoning", "no file named", "no pattern named", "no file"],
)
def test_a_parser_that_cannot_be_is_named_before_anything_starts(settings, words):
    with pytest.raises(ConfigError, match=words):
        check_parsers(server_config(**settings).api)


def test_harmony_has_thinking_calls_and_answer_whichever_parser_is_named():
    analysis = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    call = '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}<|call|>'
    final = "<|channel|>final<|message|>Four."
    with RunningServer(WritingEngine(), tool_call_parser="openai", reasoning_parser="openai_gptoss") as server:
        whole, (parts, usage) = ask(server, analysis + call), streamed(server, analysis + call)
        assert without_ids(parts[0]) == shown(whole.choices[0])
        assert shown(whole.choices[0])["reasoning"] == "Hm." and shown(whole.choices[0])["calls"] == [
            ["add", '{"a": 1}']
        ]
        assert usage == whole.usage and usage.completion_tokens_details.reasoning_tokens > 0
        plain = ask(server, analysis + final, tools=openai.omit).choices[0].message
        assert (plain.reasoning, plain.content) == ("Hm.", "Four.")


def run_agent(server: RunningServer, task: str, *, stream: bool, **fields: Any) -> tuple[list[str], str]:
    """Answer `task`, running the tools that are called; (their names, the last answer)."""
    messages: list[Any] = [{"role": "user", "content": task}]
    used: list[str] = []
    for _ in range(6):
        asked: dict[str, Any] = {**ASKED, "messages": messages, **fields}
        with server.client() as client:
            if stream:
                with client.chat.completions.stream(**asked) as events:
                    choice: Any = events.get_final_completion().choices[0]
            else:
                choice = client.chat.completions.create(**asked).choices[0]
        messages.append(choice.message.model_dump(exclude_none=True, exclude={"parsed"}))
        if choice.finish_reason != "tool_calls":
            return used, choice.message.content
        for call in choice.message.tool_calls:
            arguments = json.loads(call.function.arguments)
            used.append(call.function.name)
            result = {"sum": arguments["a"] + arguments["b"]} if call.function.name == "add" else {"weather": "sunny"}
            messages.append({"role": "tool", "tool_call_id": call.id, "content": json.dumps(result)})
    raise AssertionError("the task was never finished")


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_an_agent_finishes_a_task_with_two_tools(tools, stream):
    def write(prompt: str, seed: int) -> str:
        if '{"sum": 3}' in prompt:
            return "Sunny, and 3."
        return f"Now the sum.\n{ADD}" if "sunny" in prompt else f"{THOUGHT}{PARIS}"

    tools.engine.write = write
    assert run_agent(tools, "Weather and sum", stream=stream) == (["get_weather", "add"], "Sunny, and 3.")


def test_marks_that_are_control_tokens_are_part_of_the_text():
    with RunningServer(WritingEngine()) as server:
        seen: list[bool] = []
        server.engine.generate = seeing(server.engine.generate, seen)
        assert "<|im_end|>" in server.state.parsing._special
        ask(server, PARIS)
        server.state.parsing._special["<tool_call>"] = 5
        ask(server, PARIS)
        ask(server, "Hi", tools=openai.omit)
    assert seen == [True, False, True]


def seeing(generate: Any, seen: list[bool]) -> Any:
    """`generate`, noting whether control tokens are left out of the text."""

    def noting(prompt: Any, params: Any, *args: Any, **options: Any) -> Any:
        seen.append(params.skip_special_tokens)
        return generate(prompt, params, *args, **options)

    return noting
