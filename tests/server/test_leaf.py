"""The embedded model behind the server: what it answers is what `LLMEngine` answers."""

from __future__ import annotations

import asyncio
import json
import re

import httpx
import openai
import pytest

from quire.cli.main import main
from quire.config.build import SERVER_SECTIONS, build_config, settings_as_dict, settings_by_name
from quire.engine.llm_engine import LLMEngine
from tests.server.engines import SteppedEngine
from tests.server.servers import RunningServer
from tests.server.test_tools import TOOLS, run_agent

QUESTION = [{"role": "user", "content": "What is 27 + 58?"}]


@pytest.fixture(scope="module")
def leaf():
    config = build_config(model="leaf", num_gpu_blocks_override=256, packing_cache=False, max_num_batched_tokens=256)
    stepped = SteppedEngine(LLMEngine.from_config(config))
    with RunningServer(stepped) as server:
        yield server
    stepped.shutdown()


def test_a_chat_has_the_right_answer_whole_and_streamed(leaf):
    client = leaf.client()
    whole = client.chat.completions.create(model="leaf", messages=QUESTION, temperature=0, max_tokens=40)
    assert "85" in whole.choices[0].message.content and whole.choices[0].finish_reason == "stop"
    stream = client.chat.completions.create(model="leaf", messages=QUESTION, temperature=0, max_tokens=40, stream=True)
    assert "".join(one.choices[0].delta.content or "" for one in stream) == whole.choices[0].message.content


def test_a_stream_says_how_far_a_long_prompt_is_computed(leaf):
    def progress(path: str, **fields) -> list[tuple[int, int, int]]:
        body = {**fields, "stream": True, "return_progress": True, "max_tokens": 3}
        lines = httpx.post(leaf.url + path, json=body).text.split("\n\n")[:-2]
        chunks = [json.loads(line.removeprefix("data: ")) for line in lines]
        told = [chunk["prompt_progress"] for chunk in chunks if "prompt_progress" in chunk]
        assert sorted(one["time_ms"] for one in told) == [one["time_ms"] for one in told]
        assert all(len(chunk["choices"]) == 1 for chunk in chunks), "clients look at the first choice"
        return [(one["total"], one["cache"], one["processed"]) for one in told]

    ids = [300 + number % 97 for number in range(600)]
    told = progress("/v1/completions", prompt=ids)  # what the client is slow to read is merged
    assert told[0] == (600, 0, 256) and told[-1] == (600, 0, 600) and told == sorted(told)
    ((total, cached, processed),) = progress("/v1/completions", prompt=ids)
    assert total == processed == 600 and cached > 500
    ((total, _, processed),) = progress("/v1/chat/completions", messages=QUESTION)
    assert total == processed == 18
    refused = httpx.post(leaf.url + "/v1/completions", json={"prompt": ids, "return_progress": True})
    assert refused.status_code == 400 and "stream=true" in refused.text


def test_16_seeded_streams_at_once_are_those_of_single_requests(leaf):
    async def ask(client: openai.AsyncOpenAI, seed: int) -> str:
        stream = await client.completions.create(
            model="leaf", prompt="Once upon a time", max_tokens=12, seed=seed, temperature=1.0, stream=True
        )
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def ask_all() -> list[str]:
        http = httpx.AsyncClient(limits=httpx.Limits(max_connections=16))
        async with leaf.async_client(http_client=http) as client:
            return await asyncio.gather(*(ask(client, seed) for seed in range(16)))

    together = asyncio.run(ask_all())
    alone = leaf.client()
    for seed in (0, 7):
        answer = alone.completions.create(
            model="leaf", prompt="Once upon a time", max_tokens=12, seed=seed, temperature=1.0
        )
        assert answer.choices[0].text == together[seed]


def test_logprobs_and_cached_tokens_are_the_engines(leaf):
    answer = leaf.client().completions.create(
        model="leaf", prompt="The quick brown fox " * 12, max_tokens=2, temperature=0, logprobs=3, echo=True
    )
    choice = answer.choices[0]
    assert "".join(choice.logprobs.tokens) == choice.text
    assert all(value <= 0 for value in choice.logprobs.token_logprobs[1:])
    again = leaf.client().completions.create(model="leaf", prompt="The quick brown fox " * 12, max_tokens=2)
    assert again.usage.prompt_tokens_details.cached_tokens > 0


def test_logprobs_of_named_tokens(leaf):
    ids = [60, 5, 200]
    settings = {"model": "leaf", "max_tokens": 3, "temperature": 0, "extra_body": {"logprob_token_ids": ids}}
    client = leaf.client()
    whole = client.completions.create(prompt="Once", **settings).choices[0].logprobs
    assert len(whole.top_logprobs) == 3 and all(3 <= len(one) <= 4 for one in whole.top_logprobs)
    messages = [{"role": "user", "content": "Hi"}]
    chat = client.chat.completions.create(messages=messages, logprobs=True, **settings).choices[0].logprobs
    assert [len(one.top_logprobs) for one in chat.content] == [3, 3, 3]
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(messages=messages, **settings)
    assert caught.value.param == "logprob_token_ids"


def test_in_a_stream_every_answers_echo_has_the_prompts_logprobs(leaf):
    stream = leaf.client().completions.create(
        model="leaf", prompt="The quick brown fox " * 12, max_tokens=3, seed=1, n=2, logprobs=1, echo=True, stream=True
    )
    echoes: dict[int, list[float | None]] = {}
    for event in stream:
        for choice in event.choices:
            echoes.setdefault(choice.index, choice.logprobs.token_logprobs[:40])
    assert echoes[0] == echoes[1] and None not in echoes[1][1:]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_an_agent_finishes_tasks_with_the_tools_it_is_offered(leaf, stream):
    used, answer = run_agent(leaf, "What is the weather in Paris?", stream=stream, temperature=0)
    assert used == ["get_weather"] and answer == "The weather in Paris is sunny."
    used, answer = run_agent(leaf, "Add 123 and 456.", stream=stream, temperature=0)
    assert used == ["add"] and "579" in answer


def test_two_calls_of_one_answer_are_both_told(leaf):
    question = [{"role": "user", "content": "What is the weather in Paris and Rome?"}]
    with leaf.client() as client:
        answer = client.chat.completions.create(
            model="leaf", messages=question, tools=TOOLS, temperature=0, max_tokens=100
        ).choices[0]
    arguments = [call.function.arguments for call in answer.message.tool_calls]
    assert arguments == ['{"city": "Paris"}', '{"city": "Rome"}'] and answer.finish_reason == "tool_calls"


def test_a_beam_search_gives_n_choices_the_best_first(leaf):
    client, extra = leaf.client(), {"use_beam_search": True, "length_penalty": 1.2}
    answer = client.completions.create(
        model="leaf", prompt="Once upon a time", max_tokens=6, n=3, extra_body={**extra, "return_token_ids": True}
    )
    texts = [choice.text for choice in answer.choices]
    assert len(set(texts)) == 3 and [choice.index for choice in answer.choices] == [0, 1, 2]
    assert answer.usage.completion_tokens == sum(len(choice.token_ids) for choice in answer.choices)
    again = client.completions.create(
        model="leaf", prompt="Once upon a time", max_tokens=6, n=3, temperature=0.7, extra_body=extra
    )
    assert [choice.text for choice in again.choices] == texts
    assert [one.split()[0] for one in again.warnings] == ["temperature"] and not hasattr(answer, "warnings")
    sampling = {"top_p": 0.5, "seed": 3, "extra_body": {**extra, "top_k": 5, "min_p": 0.0}}
    chat = client.chat.completions.create(model="leaf", messages=QUESTION, max_tokens=40, n=2, **sampling)
    assert len(chat.choices) == 2 and "85" in chat.choices[0].message.content
    assert [one.split()[0] for one in chat.warnings] == ["top_p", "top_k", "seed"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"use_beam_search": True, "stream": True}, "stream"),
        ({"use_beam_search": True, "echo": True, "logprobs": 1}, "logprobs"),
        ({"use_beam_search": True, "repetition_penalty": 1.1}, "repetition_penalty"),
        ({"use_beam_search": True, "stop": ["x"]}, "stop"),
        ({"use_beam_search": True, "structured_outputs": {"regex": "a+"}}, "structured_outputs.regex"),
        ({"use_beam_search": True, "response_format": {"type": "json_object"}}, "response_format"),
        ({"use_beam_search": True, "vllm_xargs": {"a": 1}}, "vllm_xargs"),
        ({"vllm_xargs": {"a": 1}}, "vllm_xargs"),
        ({"use_beam_search": True, "early_stopping": "sometimes"}, "early_stopping"),
        ({"length_penalty": 1.2}, "length_penalty"),
    ],
)
def test_what_does_not_go_with_a_beam_search_is_refused_by_name(leaf, fields, param):
    answer = httpx.post(f"{leaf.url}/v1/completions", json={"prompt": "a", "n": 2, **fields})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param


def test_print_config_shows_what_a_started_engine_runs_with(capsys):
    flags = ["--model", "leaf", "--num-gpu-blocks-override", "256", "--no-packing-cache"]
    engine = LLMEngine.from_config(build_config(model="leaf", num_gpu_blocks_override=256, packing_cache=False))
    running = settings_as_dict(engine.config)
    engine.shutdown()
    assert main(["generate", "--print-config", *flags]) == 0
    shown = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    for name, value in running.items():
        value = (", ".join(value) or None) if isinstance(value, tuple) else value
        text = "none" if value is None else str(value) or '""'
        assert shown[name].partition("   <- auto")[0] == text, name
    assert main(["bench", "latency", "--print-config", *flags]) == 0
    assert re.search(r"^enable_prefix_caching +False$", capsys.readouterr().out, flags=re.MULTILINE)


def test_print_config_shows_the_server_and_hides_its_keys(capsys, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "a-secret-key")
    assert main(["serve", "leaf", "--print-config", "--port", "77", "--allowed-origins", "http://a"]) == 0
    printed = capsys.readouterr().out
    shown = dict(line.split(maxsplit=1) for line in printed.splitlines() if line)
    assert (shown["port"], shown["allowed_origins"], shown["api_key"]) == ("77", "http://a", "(hidden)")
    assert set(settings_by_name(SERVER_SECTIONS)) & set(shown) and "a-secret-key" not in printed
    assert shown["max_decode_slowdown"].startswith("2.0") and shown["max_num_seqs"].endswith("server on a CPU")
