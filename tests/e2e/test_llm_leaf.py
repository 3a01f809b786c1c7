"""The embedded model, offline: what a newcomer types first."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from quire import LLM, SamplingParams
from quire.entrypoints.cli.main import main

GREEDY = SamplingParams(temperature=0, max_tokens=64)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(max_model_len=512) as llm:
        yield llm


def test_it_answers_and_ends_its_turn(llm):
    conversations = [[{"role": "user", "content": text}] for text in ("Hello! Who are you?", "What is 2 + 3?")]
    for output in llm.chat(conversations, GREEDY):
        assert output.outputs[0].finish_reason == "stop"
        assert output.outputs[0].text.strip()
        assert "<|im_end|>" not in output.outputs[0].text


def test_it_is_told_of_tools(llm):
    tools = [{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}]
    (output,) = llm.chat([{"role": "user", "content": "Weather in Oslo?"}], GREEDY, tools=tools)
    assert "get_weather" in output.prompt


def test_the_demo_answers_everything(capsys):
    assert main(["demo", "--max-model-len", "512", "--max-tokens", "24"]) == 0
    assert "8 prompts at once" in capsys.readouterr().out
