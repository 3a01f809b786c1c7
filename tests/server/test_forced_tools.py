"""Forced calls and ended thinking with real models: `leaf`, and one whose weights are random, at temperature 1."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from quire.config.build import build_config
from quire.engine.llm_engine import LLMEngine
from tests.effort import effort
from tests.server.engines import SteppedEngine
from tests.server.servers import RunningServer
from tests.server.test_tools import allowed, named
from tests.structured.libraries import needs_libraries
from tests.structured.test_forced import OFFERED, TOOLS, check_calls

pytestmark = needs_libraries
ASKED: dict[str, Any] = {
    "model": "leaf",
    "messages": [{"role": "user", "content": "What is the weather in Paris?"}],
    "tools": OFFERED, "temperature": 1.0, "max_tokens": 70,
}  # fmt: skip
THINKING = [{"role": "system", "content": "Answer. /think"}, {"role": "user", "content": "What is 3 + 4?"}]


@pytest.fixture(scope="module", params=["leaf", "random"])
def server(request) -> Iterator[RunningServer]:
    weights = {"load_format": "dummy"} if request.param == "random" else {}
    config = build_config(model="leaf", num_gpu_blocks_override=256, packing_cache=False, **weights)
    stepped = SteppedEngine(LLMEngine.from_config(config))
    with RunningServer(stepped, reasoning_parser="think") as running:
        yield running
    stepped.shutdown()


def whole(server: RunningServer, **fields: Any) -> Any:
    with server.client() as client:
        return client.chat.completions.create(**{**ASKED, **fields})


def streamed(server: RunningServer, **fields: Any) -> dict[str, Any]:
    answer: dict[str, Any] = {"content": "", "reasoning": "", "calls": [], "reason": None}
    with server.client() as client:
        for chunk in client.chat.completions.create(**{**ASKED, **fields, "stream": True}):
            for choice in chunk.choices:
                answer["content"] += choice.delta.content or ""
                answer["reasoning"] += getattr(choice.delta, "reasoning", None) or ""
                answer["reason"] = choice.finish_reason or answer["reason"]
                for part in choice.delta.tool_calls or []:
                    if part.id is not None:
                        answer["calls"].append((part.function.name, ""))
                    name, text = answer["calls"][-1]
                    answer["calls"][-1] = (name, text + part.function.arguments)
    return answer


def as_dict(choice: Any) -> dict[str, Any]:
    message = choice.message
    return {
        "content": message.content or "", "reasoning": getattr(message, "reasoning", None) or "",
        "calls": [(call.function.name, call.function.arguments) for call in message.tool_calls or []],
        "reason": choice.finish_reason,
    }  # fmt: skip


def many(ask: Any, count: int) -> list[Any]:
    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(ask, range(count)))


def check(answer: dict[str, Any], names: set[str]) -> None:
    """An answer whose calls were forced."""
    assert answer["reason"] in ("tool_calls", "length")
    if answer["reason"] == "tool_calls":
        assert answer["calls"] and not answer["content"]
        check_calls(answer["calls"], TOOLS)
    assert {name for name, _ in answer["calls"]} <= names


NAMES = {one["name"] for one in TOOLS}
CHOICES: list[tuple[dict[str, Any], set[str]]] = [
    ({"tool_choice": "required"}, NAMES),
    ({"tool_choice": "required", "parallel_tool_calls": False}, NAMES),
    ({"tool_choice": named("plot")}, {"plot"}),
    ({"tool_choice": allowed("required", "now", "weather")}, {"now", "weather"}),
]


@pytest.mark.parametrize(("fields", "names"), CHOICES, ids=["required", "one", "named", "allowed"])
def test_a_forced_call_is_a_valid_call_whole_and_streamed(server: RunningServer, fields: Any, names: set[str]):
    max_calls = 1 if "parallel_tool_calls" in fields or names == {"plot"} else 99

    def ask(seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
        asked = {**fields, "seed": 1 + seed}
        return as_dict(whole(server, **asked).choices[0]), streamed(server, **asked)

    answers = many(ask, 4)
    for one, other in answers:
        check(one, names)
        assert one == other
        assert len(one["calls"]) <= max_calls
    assert any(one["reason"] == "tool_calls" for one, _ in answers)


def test_n_answers_are_forced_each(server: RunningServer):
    for choice in whole(server, tool_choice="required", n=4, seed=5).choices:
        check(as_dict(choice), NAMES)


def test_a_call_that_is_cut_says_length(server: RunningServer):
    answer = as_dict(whole(server, tool_choice=named("weather"), max_tokens=12).choices[0])
    assert answer["reason"] == "length"


def test_the_form_of_an_answer_is_for_what_follows_the_thinking(server: RunningServer):
    schema = {"type": "object", "properties": {"n": {"enum": [1, 7]}}, "required": ["n"]}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    fields = {"messages": THINKING, "tools": openai.omit, "response_format": form, "max_tokens": 200}

    def ask(seed: int) -> Any:
        asked = {**fields, "seed": seed, "extra_body": {"thinking_token_budget": 40}}
        answer = whole(server, **asked)
        assert as_dict(answer.choices[0]) == streamed(server, **asked)
        return answer

    for answer in many(ask, 4):
        choice = answer.choices[0]
        assert choice.finish_reason == "stop" and json.loads(choice.message.content)["n"] in (1, 7)
        assert answer.usage.completion_tokens_details.reasoning_tokens <= 40


def test_thinking_goes_before_forced_calls(server: RunningServer):
    fields = {"messages": THINKING, "tool_choice": "required", "extra_body": {"thinking_token_budget": 20}}
    answers = many(lambda seed: as_dict(whole(server, **fields, seed=seed).choices[0]), effort(2, 4))
    for answer in answers:
        check(answer, NAMES)


@pytest.mark.parametrize("budget", [0, 1, 7])
def test_thinking_is_ended_after_exactly_its_budget(server: RunningServer, budget: int):
    prompt = {"messages": [*THINKING, {"role": "assistant", "content": "<think>\nLet me see."}]}
    fields = {**prompt, "tools": openai.omit, "max_tokens": 30, "logprobs": True,
              "extra_body": {"continue_final_message": True, "add_generation_prompt": False,
                             "thinking_token_budget": budget}}  # fmt: skip
    for seed in range(2):
        answer = whole(server, **fields, seed=seed)
        count = answer.usage.completion_tokens_details.reasoning_tokens
        assert count <= budget
        tokens = [one.token for one in answer.choices[0].logprobs.content]
        if "</think>" not in tokens[:budget]:
            assert count == budget and tokens[budget] == "</think>"
            assert answer.choices[0].logprobs.content[budget].logprob == pytest.approx(0.0)


def test_beside_tools_an_answer_has_its_form_or_is_calls(server: RunningServer):
    schema = {"type": "object", "properties": {"n": {"enum": [1, 7]}}, "required": ["n"]}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    answers = many(lambda seed: as_dict(whole(server, response_format=form, seed=seed).choices[0]), effort(4, 6))
    for answer in answers:
        if answer["calls"]:
            check(answer, NAMES)
        elif answer["reason"] == "stop":
            assert json.loads(answer["content"])["n"] in (1, 7)
        else:
            assert answer["reason"] == "length"


def test_calls_of_strict_functions_are_valid_when_the_model_calls_of_its_own_accord(server: RunningServer):
    strict = [{"type": "function", "function": {**one, "strict": True}} for one in TOOLS]
    answers = many(lambda seed: as_dict(whole(server, tools=strict, seed=seed).choices[0]), effort(4, 6))
    for answer in answers:
        complete = answer["calls"][:-1] if answer["reason"] == "length" else answer["calls"]
        check_calls(complete, TOOLS)
        assert "<tool_call>" not in answer["content"]


def test_a_form_may_hold_inside_of_the_thinking_too():
    config = build_config(
        model="leaf", num_gpu_blocks_override=64, packing_cache=False, structured_outputs_enable_in_reasoning=True
    )
    stepped = SteppedEngine(LLMEngine.from_config(config))
    with RunningServer(stepped, reasoning_parser="think") as running:
        fields = {
            "messages": THINKING,
            "tools": openai.omit,
            "extra_body": {"structured_outputs": {"regex": "[ab]{3}"}},
        }
        answer = as_dict(whole(running, **fields).choices[0])
        assert answer["reasoning"] == "" and len(answer["content"]) == 3
        fields["extra_body"]["thinking_token_budget"] = 3
        with pytest.raises(openai.BadRequestError, match="thinking_token_budget"):
            whole(running, **fields)
    stepped.shutdown()
