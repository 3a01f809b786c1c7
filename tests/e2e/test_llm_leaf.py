"""The embedded model, offline: what a newcomer types first."""

from __future__ import annotations

import doctest
from collections.abc import Iterator

import pytest

from quire import LLM, SamplingParams
from quire.cli.main import main
from quire.errors import ValidationError
from quire.metrics.records import Gauge

GREEDY = SamplingParams(temperature=0, max_tokens=64)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(max_model_len=512, disable_log_stats=False) as llm:
        yield llm


@pytest.mark.parametrize("method", [LLM.generate, LLM.chat])
def test_the_examples_in_the_docstrings_do_what_they_say(llm, method):
    runner = doctest.DocTestRunner()
    for example in doctest.DocTestFinder(recurse=False).find(
        method, globs={"llm": llm, "SamplingParams": SamplingParams}
    ):
        runner.run(example)
    assert runner.tries and not runner.failures


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


def test_figures_are_records_under_the_names_of_a_server(llm):
    before = {metric.name: metric for metric in llm.get_metrics()}
    outputs = llm.generate(["Once", "Twice"], SamplingParams(temperature=0, max_tokens=5, ignore_eos=True))
    after = {metric.name: metric for metric in llm.get_metrics()}

    def grown(name: str, field: str) -> float:
        return getattr(after[name], field) - getattr(before[name], field)

    assert grown("vllm:generation_tokens", "value") == 10
    assert grown("vllm:prompt_tokens", "value") == sum(len(output.prompt_token_ids) for output in outputs)
    assert (
        grown("vllm:request_generation_tokens", "count") == 2 and grown("vllm:request_generation_tokens", "sum") == 10
    )
    assert grown("vllm:inter_token_latency_seconds", "count") == 8
    assert isinstance(after["vllm:num_requests_running"], Gauge)
    assert list(after["vllm:time_to_first_token_seconds"].buckets)[-1] == "+Inf"


def test_the_worker_and_its_model_can_be_called(llm):
    (num_weights,) = llm.apply_model(lambda model: sum(weight.numel() for weight in model.parameters()))
    (specs,) = llm.collective_rpc("kv_cache_specs")
    assert num_weights > 0 and len(specs) > 0 and llm.get_world_size() == 1
    with pytest.raises(ValidationError, match="not have a method 'no_such_method'"):
        llm.collective_rpc("no_such_method")


def test_the_demo_answers_everything(capsys):
    assert main(["demo", "--max-model-len", "512", "--max-tokens", "24"]) == 0
    assert "8 prompts at once" in capsys.readouterr().out
