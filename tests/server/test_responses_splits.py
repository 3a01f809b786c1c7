"""However an answer is cut into outputs, its stream comes to the whole response, log-probabilities included."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from quire.core.inputs import TokensPrompt
from quire.core.outputs import CompletionOutput, RequestOutput
from quire.core.sampling_params import SamplingParams
from quire.server.api.responses.envelope import ResponseEnvelope
from quire.server.api.responses.protocol import ResponsesRequest
from quire.server.api.responses.writer import ResponseWriter
from quire.server.chat.counts import AnswerCounts
from quire.server.chat.protocol.chat import ChatRequest
from quire.server.chat.protocol.warnings import Warnings
from quire.server.chat.running import GenerationJob
from quire.tokenization.incremental import IncrementalDetokenizer
from tests.server.engines import WritingEngine
from tests.server.servers import RunningServer
from tests.server.test_tools import ADD, ANSWERS, PARIS, TOOLS

MORE = {"text between calls": f"Now.\n{PARIS}\nThen é ü 日本.\n{ADD}\nDone.", "empty": ""}
PROMPT = [5, 6, 7]


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with RunningServer(WritingEngine(), reasoning_parser="think") as running:
        yield running


class Answer:
    """A text as tokens, and writers of it."""

    def __init__(
        self, server: RunningServer, text: str, *, has_tools: bool, reason: str, num_logprobs: int | None = 1
    ) -> None:
        self._num_logprobs = num_logprobs
        self._state = server.state
        self._engine = server.engine
        self._reason = reason
        self._has_tools = has_tools
        self.ids = server.engine.tokenizer.encode(text, add_special_tokens=False)

    def writer(self) -> ResponseWriter:
        chat = ChatRequest(messages=[{"role": "user", "content": "x"}], tools=TOOLS if self._has_tools else None)
        params = SamplingParams(max_tokens=500, logprobs=1)
        work = GenerationJob(
            public_id="resp_1",
            tenant=self._state.tenants.anonymous,
            prompts=[TokensPrompt(tuple(PROMPT))],
            params=params,
        )
        form = ResponseEnvelope(
            ResponsesRequest(input="x"), params, "resp_1", model="leaf", is_stored=False, warnings=()
        )
        plan = self._state.parsing.plan(chat, Warnings()) if self._has_tools else None
        counts = AnswerCounts(self._state, work, "leaf")
        return ResponseWriter(form, counts, plan, self._state.engine.tokenizer, self._num_logprobs)

    def outputs(self, cuts: list[int]) -> list[RequestOutput]:
        """The answer, cut before these tokens."""
        text = IncrementalDetokenizer.create(self._engine.tokenizer, PROMPT)
        bounds = [0, *cuts, len(self.ids)]
        outputs = []
        for first, last in zip(bounds, bounds[1:], strict=False):
            ids = self.ids[first:last]
            is_end = last == len(self.ids)
            part = text.push(ids) + (text.finish() if is_end else "")
            lines = [self._engine.line(one, 1) for one in ids]
            answer = CompletionOutput(0, part, ids, None, lines, self._reason if is_end else None)
            outputs.append(RequestOutput("r", None, PROMPT, [answer], is_end))
        return outputs

    def streamed(self, cuts: list[int]) -> list[dict[str, Any]]:
        writer = self.writer()
        data = b"".join(writer.events(0, output) for output in self.outputs(cuts)) + writer.end()
        events = [json.loads(line[6:]) for line in data.splitlines() if line.startswith(b"data: ")]
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        return events


def without_ids(response: dict[str, Any]) -> dict[str, Any]:
    items = [{name: item[name] for name in item if name not in ("id", "call_id")} for item in response["output"]]
    return {**response, "output": items, "created_at": 0, "completed_at": 0}


def check(answer: Answer, whole: dict[str, Any], cuts: list[int]) -> None:
    events = answer.streamed(cuts)
    final = events[-1]["response"]
    assert without_ids(final) == whole, cuts
    assert [event["item"] for event in events if event["type"] == "response.output_item.done"] == final["output"]
    texts = dict.fromkeys(range(len(final["output"])), "")
    for event in events:
        if event["type"].endswith(".delta"):
            texts[event["output_index"]] += event["delta"]
            assert event["item_id"] == final["output"][event["output_index"]]["id"]
    for index, item in enumerate(final["output"]):
        assert texts[index] == (item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"])


@pytest.mark.parametrize("reason", ["stop", "length"])
@pytest.mark.parametrize("name", [*ANSWERS, *MORE])
def test_every_split_of_an_answer_comes_to_the_same(server, name, reason):
    text = {**ANSWERS, **MORE}[name]
    for has_tools, num_logprobs in ((True, 1), (True, None), (False, 1), (False, None)):
        answer = Answer(server, text, has_tools=has_tools, reason=reason, num_logprobs=num_logprobs)
        whole = without_ids(json.loads(answer.writer().whole(answer.outputs([]))))
        generator = random.Random(name)
        places = range(1, len(answer.ids))
        cuts = [[], list(places), *([one] for one in places if num_logprobs is not None and reason == "stop")]
        cuts += [sorted(generator.sample(places, generator.randint(0, len(places)))) for _ in range(10) if places]
        for one in cuts:
            check(answer, whole, one)


def test_only_the_tokens_of_a_message_have_log_probabilities(server):
    answer = Answer(server, MORE["text between calls"], has_tools=True, reason="stop")
    whole = json.loads(answer.writer().whole(answer.outputs([])))
    messages = [item["content"][0] for item in whole["output"] if item["type"] == "message"]
    assert [item["type"] for item in whole["output"]] == ["message", "function_call"] * 2 + ["message"]
    for part in messages:
        told = b"".join(bytes(entry["bytes"]) for entry in part["logprobs"]).decode()
        assert told.strip().startswith(part["text"].strip()[:-1]), (told, part["text"])
        assert len(told) < len(part["text"]) + 4 and all(len(one["top_logprobs"]) == 1 for one in part["logprobs"])


def test_a_response_is_what_its_json_says(server):
    writer = Answer(server, "Hi", has_tools=False, reason="stop")
    response = msgspec.json.decode(writer.writer().whole(writer.outputs([])))
    assert response["usage"]["output_tokens"] == len(writer.ids) and response["status"] == "completed"
