"""/v1/responses through OpenAI's own client: what a stream comes to is the whole response; turns follow each other."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pydantic
import pytest

from tests.server.engines import WritingEngine
from tests.server.servers import RunningServer
from tests.server.test_tools import ADD, ANSWERS, PARIS, THOUGHT
from tests.server.test_tools import TOOLS as CHAT_TOOLS

TOOLS: list[Any] = [{"type": "function", **tool["function"]} for tool in CHAT_TOOLS]
ASKED: dict[str, Any] = {"model": "leaf", "input": "Hello", "max_output_tokens": 200}
ALLOWED_UNKNOWN = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "x"}]}
ORDER = ["response.created", "response.in_progress"]
MESSAGE = [
    "response.output_item.added", "response.content_part.added", "response.output_text.delta",
    "response.output_text.done", "response.content_part.done", "response.output_item.done",
]  # fmt: skip
THINKING = [name.replace("output_text", "reasoning_text") for name in MESSAGE]
CALL = [
    "response.output_item.added", "response.function_call_arguments.delta", "response.function_call_arguments.done",
    "response.output_item.done",
]  # fmt: skip


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with RunningServer(WritingEngine(), reasoning_parser="think") as running:
        yield running


def ask(server: RunningServer, written: str, /, **fields: Any) -> Any:
    """The whole response when the model writes this."""
    server.engine.write = lambda prompt, seed: written
    with server.client() as client:
        return client.responses.create(**{**ASKED, **fields})


def stream(server: RunningServer, written: str, /, **fields: Any) -> list[Any]:
    """The events of the same as a stream."""
    server.engine.write = lambda prompt, seed: written
    with server.client() as client:
        return list(client.responses.create(**{**ASKED, "stream": True, **fields}))


def prompt_of(server: RunningServer) -> str:
    """The last prompt as text."""
    return server.engine.tokenizer.decode(server.engine.prompts[-1], skip_special_tokens=False)


def plain(response: Any) -> dict[str, Any]:
    """What a response says, without what differs between two that say the same."""
    content = response.model_dump(exclude_none=True)
    for name in ("id", "created_at", "completed_at", "store"):
        content.pop(name, None)
    for item in content["output"]:
        for name in ("id", "call_id"):
            item.pop(name, None)
    return content


def kinds(events: list[Any]) -> list[str]:
    """Their types, repeated ones once."""
    names = [event.type for event in events]
    return [name for number, name in enumerate(names) if not number or names[number - 1] != name]


def error_of(caught: Any) -> tuple[int, str, str | None]:
    error = caught.value
    return error.status_code, error.type, error.param


def test_a_response_has_the_text_and_what_it_cost(server):
    response = ask(server, "It is 5 < 6.", instructions="Be brief.", metadata={"user": "7"}, temperature=0.5)
    assert response.id.startswith("resp_") and response.object == "response" and response.status == "completed"
    assert response.output_text == "It is 5 < 6."
    (message,) = response.output
    assert message.id.startswith("msg_") and message.role == "assistant" and message.status == "completed"
    usage = response.usage
    assert (
        usage.total_tokens
        == usage.input_tokens + usage.output_tokens
        == usage.input_tokens + len(server.engine.tokenizer.encode("It is 5 < 6.", add_special_tokens=False))
    )
    assert usage.input_tokens_details.cached_tokens == usage.input_tokens // 2
    assert response.metadata == {"user": "7"} and response.temperature == 0.5 and response.instructions == "Be brief."
    assert response.error is None and response.incomplete_details is None and response.max_output_tokens == 200
    assert "Be brief." in prompt_of(server) and "Hello" in prompt_of(server)


@pytest.mark.parametrize("name", ANSWERS)
@pytest.mark.parametrize("limit", [200, 17])
def test_a_stream_comes_to_the_whole_response(server, name, limit):
    fields: dict[str, Any] = {
        "tools": TOOLS, "max_output_tokens": limit, "include": ["message.output_text.logprobs"], "top_logprobs": 1
    }  # fmt: skip
    whole = ask(server, ANSWERS[name], **fields)
    events = stream(server, ANSWERS[name], **fields)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert kinds(events)[:2] == ORDER and events[-1].type == f"response.{whole.status}"
    final = events[-1].response
    assert plain(final) == plain(whole)
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert done == final.output
    for index, item in enumerate(final.output):
        parts = [event for event in events if getattr(event, "output_index", None) == index]
        deltas = [event for event in parts if event.type.endswith(".delta")]
        text = "".join(event.delta for event in deltas)
        if item.type == "function_call":
            assert text == item.arguments
            continue
        assert text == item.content[0].text
        if item.type == "message":
            last = next(event for event in parts if event.type == "response.output_text.done")
            assert last.text == text and item.content[0].logprobs == whole.output[index].content[0].logprobs
            told = [one.token for event in deltas for one in event.logprobs]
            assert told == [one.token for one in item.content[0].logprobs][: len(told)]
            assert "".join(told).strip() == text.strip()


def test_events_come_in_the_standing_order(server):
    assert kinds(stream(server, "Hi")) == [*ORDER, *MESSAGE, "response.completed"]
    assert kinds(stream(server, ANSWERS["two"], tools=TOOLS)) == [*ORDER, *CALL, *CALL, "response.completed"]
    events = kinds(stream(server, ANSWERS["thought and call"], tools=TOOLS))
    assert events == [*ORDER, *THINKING, *CALL, "response.completed"]
    assert kinds(stream(server, "Hello there", max_output_tokens=1))[-1] == "response.incomplete"
    assert kinds(stream(server, "")) == [*ORDER, *[one for one in MESSAGE if "delta" not in one], "response.completed"]


def test_the_clients_own_accumulation_agrees_with_the_final_response(server):
    for name in ("plain", "thought and call", "two"):
        server.engine.write = lambda prompt, seed, name=name: ANSWERS[name]
        with server.client() as client, client.responses.stream(**ASKED, tools=TOOLS) as events:
            seen = list(events)
            final = events.get_final_response()
        snapshots = [event.snapshot for event in seen if event.type == "response.output_text.delta"]
        assert (snapshots[-1] if snapshots else "") == final.output_text
        assert plain(final)["output"] == [
            {**item, **({"parsed_arguments": None} if "x" in item else {})}
            for item in plain(ask(server, ANSWERS[name], tools=TOOLS))["output"]
        ]


def test_an_answer_that_the_limit_cuts_is_incomplete_and_says_why(server):
    response = ask(server, "One two three four", max_output_tokens=2)
    assert response.status == "incomplete" and response.incomplete_details.reason == "max_output_tokens"
    assert response.output[0].status == "incomplete"
    response = ask(server, ANSWERS["thought"], max_output_tokens=4)
    assert [item.type for item in response.output] == ["reasoning"]


def test_thinking_is_an_item_of_its_own_and_its_tokens_are_counted(server):
    response = ask(server, ANSWERS["thought"])
    thinking, message = response.output
    assert thinking.type == "reasoning" and thinking.id.startswith("rs_")
    assert thinking.content[0].text == "Two and two." and thinking.summary == []
    assert message.content[0].text == response.output_text == "Four."
    inner = server.engine.tokenizer.encode("\nTwo and two.\n", add_special_tokens=False)
    assert response.usage.output_tokens_details.reasoning_tokens == len(inner)


class Answer(pydantic.BaseModel):
    number: int
    unit: str


def test_a_pydantic_model_comes_back_parsed(server):
    server.engine.write = lambda prompt, seed: '{"number": 7, "unit": "km"}'
    seen = watched(server)
    with server.client() as client:
        parsed = client.responses.parse(**ASKED, text_format=Answer)
        with client.responses.stream(**ASKED, text_format=Answer) as events:
            streamed = events.get_final_response()
    assert parsed.output_parsed == streamed.output_parsed == Answer(number=7, unit="km")
    assert all(one.structured_outputs.json["required"] == ["number", "unit"] for one in seen)
    assert parsed.text.format.name == "Answer"
    ask(server, "{}", text={"format": {"type": "json_object"}})
    assert seen[-1].structured_outputs.json_object


def watched(server: RunningServer) -> list[Any]:
    """The parameters of the requests that follow."""
    seen: list[Any] = []
    generate = type(server.engine).generate.__get__(server.engine)

    def noting(prompt: Any, params: Any, *args: Any, **options: Any) -> Any:
        seen.append(params)
        return generate(prompt, params, *args, **options)

    server.engine.generate = noting
    return seen


def test_extras_reach_the_engine(server):
    seen = watched(server)
    extras = {
        "seed": 5, "stop": ["END"], "top_k": 3, "min_p": 0.25, "ignore_eos": True, "stop_token_ids": [9],
        "presence_penalty": 0.5, "repetition_penalty": 1.5, "logit_bias": {"7": -1.0}, "priority": 0,
    }  # fmt: skip
    response = ask(server, "Hi", top_p=0.5, extra_body={**extras, "request_id": "mine"}, store=False)
    (params,) = seen
    assert (params.seed, params.top_k, params.min_p, params.ignore_eos, params.top_p) == (5, 3, 0.25, True, 0.5)
    assert params.stop == ["END"] and params.stop_token_ids == [9] and params.logit_bias == {7: -1.0}
    assert (params.presence_penalty, params.repetition_penalty) == (0.5, 1.5)
    assert response.id == "resp_mine"


def test_what_has_no_effect_is_named(server):
    response = ask(
        server, "Hi", reasoning={"effort": "high", "summary": "auto"}, text={"verbosity": "low"}, user="me",
        include=["reasoning.encrypted_content"], max_tool_calls=3, extra_body={"colour": "red"},
    )  # fmt: skip
    warnings = " ".join(response.warnings)
    for word in (
        "reasoning.effort",
        "reasoning.summary",
        "text.verbosity",
        "user",
        "include",
        "max_tool_calls",
        "colour",
    ):
        assert word in warnings, word
    assert not hasattr(ask(server, "Hi"), "warnings")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": openai.omit}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "add", "arguments": "{"}]}, "input"),
        ({"input": "word " * 4000}, "input"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "functon", "name": "f"}]}, "tools"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "mcp"}]}]}, "tools"),
        ({"tools": [{"type": "function", "name": "two words"}]}, "tools"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": ALLOWED_UNKNOWN}, "tool_choice"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"truncation": "middle"}, "truncation"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"include": ["nothing"]}, "include"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"text": {"format": {"type": "xml"}}}, "text"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {}, "strict": "yes"}}}, "text"),
        ({"reasoning": {"effort": "enormous"}}, "reasoning"),
        ({"metadata": {"x" * 65: "y"}}, "metadata"),
        ({"background": True, "store": False}, "background"),
        ({"temperature": -1.0}, "temperature"),
    ],
    ids=lambda value: value if isinstance(value, str) else "-",
)  # fmt: skip
def test_what_cannot_be_done_is_refused_by_name(server, fields, param):
    with pytest.raises(openai.BadRequestError) as caught:
        ask(server, "x", **fields)
    assert error_of(caught) == (400, "invalid_request_error", param)


def test_a_model_that_does_not_exist_is_404(server):
    with pytest.raises(openai.NotFoundError) as caught:
        ask(server, "x", model="gpt-9")
    assert error_of(caught) == (404, "invalid_request_error", "model")


def test_calls_and_their_results_reach_the_template(server):
    first = ask(server, f"{THOUGHT}{PARIS}", tools=TOOLS, input=[{"role": "user", "content": "Weather?"}])
    call = first.output[-1]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": '{"weather": "sunny"}'}
    conversation = [{"role": "user", "content": "Weather?"}, *first.output, result]
    ask(server, "Fine.", tools=TOOLS, input=conversation)
    by_items = prompt_of(server)
    assert PARIS in by_items and '<tool_response>\n{"weather": "sunny"}\n</tool_response>' in by_items
    ask(server, "Fine.", tools=TOOLS, input=[result], previous_response_id=first.id)
    assert prompt_of(server) == by_items


def run_agent(server: RunningServer, task: str, *, streams: bool, stores: bool) -> tuple[list[str], str]:
    """Answer `task`, running the tools that are called; (their names, the last answer)."""
    given: list[Any] = [{"role": "user", "content": task}]
    used: list[str] = []
    previous: Any = openai.omit
    for _ in range(6):
        asked: dict[str, Any] = {
            **ASKED,
            "tools": TOOLS,
            "input": given,
            "store": stores,
            "previous_response_id": previous,
        }
        with server.client() as client:
            if streams:
                with client.responses.stream(**asked) as events:
                    response: Any = events.get_final_response()
            else:
                response = client.responses.create(**asked)
        calls = [item for item in response.output if item.type == "function_call"]
        if not calls:
            return used, response.output_text
        given = [] if stores else [*given, *response.output]
        previous = response.id if stores else openai.omit
        for call in calls:
            arguments = json.loads(call.arguments)
            used.append(call.name)
            result = {"sum": arguments["a"] + arguments["b"]} if call.name == "add" else {"weather": "sunny"}
            given.append({"type": "function_call_output", "call_id": call.call_id, "output": json.dumps(result)})
    raise AssertionError("the task was never finished")


@pytest.mark.parametrize("stores", [False, True], ids=["stateless", "stored"])
@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
def test_an_agent_finishes_a_task_with_two_tools(server, streams, stores):
    def write(prompt: str, seed: int) -> str:
        if '{"sum": 3}' in prompt:
            return "Sunny, and 3."
        return f"Now the sum.\n{ADD}" if "sunny" in prompt else f"{THOUGHT}{PARIS}"

    server.engine.write = write
    used = run_agent(server, "Weather and sum", streams=streams, stores=stores)
    assert used == (["get_weather", "add"], "Sunny, and 3.")


def test_an_error_inside_a_stream_is_an_event_and_fails_the_response():
    engine = WritingEngine(fails_after=2)
    with RunningServer(engine) as server:
        events = stream(server, "One two three four five")
        assert kinds(events)[-2:] == ["error", "response.failed"]
        assert events[-2].code == "server_error" and "failed inside the engine" in events[-2].message
        failed = events[-1].response
        assert failed.status == "failed" and failed.error.code == "server_error"
        assert [event.sequence_number for event in events] == list(range(len(events)))
        with server.client() as client, pytest.raises(openai.InternalServerError):
            client.responses.create(**ASKED)


def test_a_stream_has_event_names_and_no_done_mark(server):
    server.engine.write = lambda prompt, seed: "Hi"
    text = httpx.post(server.url + "/v1/responses", json={**ASKED, "stream": True}).text
    lines = [line for line in text.splitlines() if line]
    assert all(line.startswith("event: response.") for line in lines[::2])
    assert all(
        json.loads(data.removeprefix("data: "))["type"] == name[7:] for name, data in zip(lines[::2], lines[1::2])
    )
    assert "[DONE]" not in text


def test_a_client_that_goes_away_ends_its_request_and_leaves_nothing_behind(server):
    server.engine.holds = True
    try:
        with pytest.raises(openai.APITimeoutError), server.client(timeout=0.5) as client:
            client.responses.create(**ASKED)
        server.wait_until(lambda: not server.engine.live)
    finally:
        server.engine.holds = False


def test_a_server_of_strict_requests_refuses_what_has_no_effect():
    with RunningServer(WritingEngine(), strict_requests=True) as server:
        with pytest.raises(openai.BadRequestError) as caught:
            ask(server, "x", text={"verbosity": "low"})
        assert caught.value.param == "text.verbosity"
        assert ask(server, "x").output_text == "x"
