"""The stream of a Messages answer comes to the whole one, however the engine's outputs are cut."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from quire.core.inputs import TokensPrompt
from quire.core.outputs import CompletionOutput, RequestOutput
from quire.core.sampling_params import SamplingParams
from quire.core.stats import RequestStateStats
from quire.parsers.events import Content, Reasoning
from quire.server.api.anthropic.calls import Call, ToolCallBuffer, is_object
from quire.server.api.anthropic.writer import MessageWriter
from quire.server.chat.answer_events import ToolCallDelta, ToolCallStart
from quire.server.chat.counts import AnswerCounts
from quire.server.chat.protocol.chat import ChatRequest
from quire.server.chat.protocol.warnings import Warnings
from quire.server.chat.running import GenerationJob
from quire.server.chat.state import ServerState, make_state
from quire.server.http.errors import ApiError
from quire.server.http.keys import ApiKeys
from tests.server.engines import ScriptedEngine
from tests.server.servers import server_config
from tests.server.test_tools import ADD, ANSWERS, BROKEN, PARIS, TOOLS

PROMPT = [5, 6, 7, 8]
TEXTS = {
    **ANSWERS,
    "nothing": "",
    "text after a call": f"{ADD}\nDone.",
    "broken, then whole": f"{BROKEN}\n{ADD}\n{PARIS}",
    "no object": '<tool_call>\n{"name": "add", "arguments": [1]}\n</tool_call>',
    "only begun": "<tool_call>\n{",
}


@pytest.fixture(scope="module")
def state() -> ServerState:
    return make_state(ScriptedEngine(), server_config(reasoning_parser="think"), ApiKeys({}))


def make_writer(state: ServerState, *, is_plain: bool = False) -> MessageWriter:
    request = ChatRequest(messages=[{"role": "user", "content": "x"}], tools=TOOLS)
    plan = None if is_plain else state.parsing.plan(request, Warnings(), buffers_tool_calls=True)
    work = GenerationJob(
        public_id="msg_1", tenant=state.tenants.anonymous, prompts=[TokensPrompt(tuple(PROMPT))],
        params=SamplingParams(),
    )  # fmt: skip
    return MessageWriter(AnswerCounts(state, work, "leaf"), plan, ["w"], "id")


def outputs(state: ServerState, text: str, cuts: list[int], **end: Any) -> list[RequestOutput]:
    """The engine's outputs of an answer that is `text`, cut after these numbers of tokens."""
    ids = state.engine.tokenizer.encode(text, add_special_tokens=False)  # type: ignore[union-attr]
    places = sorted({min(cut, len(ids)) for cut in cuts})
    made, begin, shown = [], 0, ""
    for place in [*places, len(ids)]:
        now = state.engine.tokenizer.decode(ids[:place])  # type: ignore[union-attr]
        is_end = place == len(ids)
        answer = CompletionOutput(
            0, now[len(shown) :], ids[begin:place], None, None,
            end.get("finish_reason", "stop") if is_end else None, end.get("stop_reason") if is_end else None,
        )  # fmt: skip
        made.append(
            RequestOutput("r", None, PROMPT, [answer], is_end, num_cached_tokens=2, metrics=RequestStateStats())
        )
        begin, shown = place, now
        if is_end:
            break
    return made


def come_to(stream: bytes) -> dict[str, Any]:
    """The message of a stream, whose order is checked."""
    message: dict[str, Any] = {}
    partial: list[str] = []
    is_open = is_over = False
    for part in stream.decode().split("\n\n")[:-1]:
        name, data = part.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}" and not is_over and (message or event["type"] == "message_start")
        match event["type"]:
            case "message_start":
                message = event["message"]
            case "content_block_start":
                assert not is_open and event["index"] == len(message["content"])
                is_open, partial = True, []
                message["content"].append(event["content_block"])
            case "content_block_delta":
                assert is_open and event["index"] == len(message["content"]) - 1
                delta, block = event["delta"], message["content"][-1]
                kind = delta["type"].removesuffix("_delta")
                if kind == "input_json":
                    partial.append(delta["partial_json"])
                elif kind == "signature":
                    block["signature"] = delta["signature"]
                else:
                    block[kind] += delta[kind]
            case "content_block_stop":
                assert is_open
                is_open = False
                if partial:
                    message["content"][-1]["input"] = json.loads("".join(partial))
            case "message_delta":
                assert not is_open
                message |= event["delta"]
                message["usage"] |= event["usage"]
            case "message_stop":
                is_over = True
    assert is_over
    return message


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    for block in message["content"]:
        block.pop("id", None)
    return message


@pytest.mark.parametrize(("name", "is_plain"), [*((name, False) for name in TEXTS), ("thought and call", True)])
def test_every_cut_of_the_outputs_comes_to_the_whole_message(state, name, is_plain):
    text = TEXTS[name]
    whole = without_ids(json.loads(make_writer(state, is_plain=is_plain).whole(outputs(state, text, []))))
    num_tokens = whole["usage"]["output_tokens"]
    rng = random.Random(name)
    cuts = [[place] for place in range(num_tokens)] + [list(range(num_tokens))]
    cuts += [sorted(rng.choices(range(num_tokens + 1), k=4)) for _ in range(20)]
    for cut in cuts:
        writer = make_writer(state, is_plain=is_plain)
        stream = b"".join(writer.events(0, output) for output in outputs(state, text, cut)) + writer.end()
        assert without_ids(come_to(stream)) == whole, cut


@pytest.mark.parametrize(
    ("text", "end", "reason"),
    [
        ("Hi", {}, ("end_turn", None)),
        ("Hi " * 16, {"finish_reason": "length"}, ("max_tokens", None)),
        ("Hi", {"finish_reason": "length"}, ("model_context_window_exceeded", None)),
        ("Hi", {"stop_reason": "!"}, ("stop_sequence", "!")),
        ("Hi", {"stop_reason": 7}, ("end_turn", None)),
        ("Hi", {"finish_reason": "repetition"}, ("end_turn", None)),
        (ADD, {}, ("tool_use", None)),
        (ADD, {"stop_reason": "!"}, ("tool_use", None)),
        (ADD, {"finish_reason": "length"}, ("max_tokens", None)),
        (BROKEN, {}, ("end_turn", None)),
    ],
    ids=[
        "end", "limit", "no room", "stop text", "stop token", "repetition", "call", "call and stop", "call and limit",
        "broken call",
    ],
)  # fmt: skip
def test_the_reason_follows_from_what_the_message_holds(state, text, end, reason):
    message = json.loads(make_writer(state).whole(outputs(state, text, [], **end)))
    assert (message["stop_reason"], message["stop_sequence"]) == reason


def test_an_aborted_answer_is_an_error(state):
    for write in (lambda writer, one: writer.whole([one]), lambda writer, one: writer.events(0, one)):
        with pytest.raises(ApiError) as caught:
            write(make_writer(state), outputs(state, "Hi", [], finish_reason="abort")[0])
        assert caught.value.kind.status == 503


def test_a_call_is_told_when_its_arguments_are_whole_wherever_they_are_cut():
    events = [ToolCallStart(0, "call_7", "f"), *(ToolCallDelta(0, char) for char in '{"a": {"b": "}"}}')]
    holder = ToolCallBuffer()
    told = [holder.push([event], is_end=False) for event in events]
    assert not any(told[:-1]) and told[-1] == [Call("toolu_7", "f", '{"a": {"b": "}"}}')]
    assert holder.push([], is_end=True) == []


@pytest.mark.parametrize(
    "arguments", ['{"a": 1, b}', "[1]", '{"a": "\\ud800"}', '{"a": NaN}', '{"a":'], ids=lambda text: text[:12]
)
def test_arguments_that_are_no_object_make_a_call_into_text(arguments):
    assert not is_object(arguments)
    events = [Reasoning("x"), ToolCallStart(0, "abc", "f"), ToolCallDelta(0, arguments), Content("after")]
    assert ToolCallBuffer().push(events, is_end=True) == [Reasoning("x"), Content(f"f {arguments}"), Content("after")]


def test_a_call_without_arguments_has_an_empty_object_and_keeps_its_formats_id():
    assert ToolCallBuffer().push([ToolCallStart(0, "abc", "f")], is_end=True) == [Call("abc", "f", "{}")]
