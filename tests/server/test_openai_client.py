"""OpenAI's own Python client, unchanged, against a running server."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import httpx
import openai
import pytest

from tests.server.engines import rule
from tests.server.servers import RunningServer

HELLO = [{"role": "user", "content": "Hello"}]


def expected(server: RunningServer, prompt: list[int], count: int, seed: int = 0) -> str:
    return server.engine.tokenizer.decode([rule(prompt, seed, position) for position in range(count)])


def test_a_chat_is_answered(server):
    answer = server.client().chat.completions.create(model="leaf", messages=HELLO, max_tokens=5)
    assert answer.choices[0].message.content == expected(server, server.engine.prompts[-1], 5)
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].message.role == "assistant"
    assert answer.object == "chat.completion" and answer.id.startswith("chatcmpl-")
    assert answer.usage.completion_tokens == 5
    assert answer.usage.prompt_tokens_details.cached_tokens == answer.usage.prompt_tokens // 2
    assert answer.system_fingerprint.startswith("quire-")


def test_a_chat_streams_the_same_text_as_it_gives_whole(server):
    whole = server.client().chat.completions.create(model="leaf", messages=HELLO, max_tokens=20)
    chunks = list(server.client().chat.completions.create(model="leaf", messages=HELLO, max_tokens=20, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "length"
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert all(chunk.usage is None for chunk in chunks)


def test_a_stream_ends_with_usage_when_asked(server):
    stream = server.client().chat.completions.create(
        model="leaf", messages=HELLO, max_tokens=7, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 7


def test_usage_comes_with_every_chunk_when_asked(server):
    stream = server.client().completions.create(
        model="leaf", prompt="One two", max_tokens=4, stream=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
    )  # fmt: skip
    counts = [chunk.usage.completion_tokens for chunk in stream]
    assert counts == [1, 2, 3, 4, 4]


def test_n_answers_have_their_own_index_and_text(server):
    answer = server.client().chat.completions.create(model="leaf", messages=HELLO, max_tokens=6, n=3, seed=9)
    prompt = server.engine.prompts[-1]
    texts = [choice.message.content for choice in answer.choices]
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert texts == [expected(server, prompt, 6, 9 + index) for index in range(3)]
    streamed = {0: "", 1: "", 2: ""}
    for chunk in server.client().chat.completions.create(
        model="leaf", messages=HELLO, max_tokens=6, n=3, seed=9, stream=True
    ):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert list(streamed.values()) == texts


def test_a_seed_repeats_an_answer_and_another_seed_does_not(server):
    def ask(seed: int) -> str:
        return server.client().completions.create(model="leaf", prompt="Once", max_tokens=8, seed=seed).choices[0].text

    assert ask(5) == ask(5) != ask(6)


def test_a_stop_text_ends_the_answer_and_is_named(server):
    whole = server.client().completions.create(model="leaf", prompt="Stop here", max_tokens=30).choices[0].text
    stop = whole[12:15]
    choice = server.client().completions.create(model="leaf", prompt="Stop here", max_tokens=30, stop=[stop]).choices[0]
    assert choice.text == whole[: whole.index(stop)]
    assert choice.finish_reason == "stop" and choice.stop_reason == stop


def test_a_stop_text_ends_a_stream_at_the_same_place(server):
    whole = server.client().completions.create(model="leaf", prompt="Stop here", max_tokens=30).choices[0].text
    stop = whole[12:15]
    chunks = list(
        server.client().completions.create(model="leaf", prompt="Stop here", max_tokens=30, stop=[stop], stream=True)
    )
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole[: whole.index(stop)]
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_logprobs_of_a_streamed_chat_are_those_of_the_whole(server):
    fields = {"model": "leaf", "messages": HELLO, "max_tokens": 5, "logprobs": True, "top_logprobs": 2}
    whole = server.client().chat.completions.create(**fields).choices[0].logprobs.content
    chunks = list(server.client().chat.completions.create(**fields, stream=True))
    streamed = [one for chunk in chunks if chunk.choices[0].logprobs for one in chunk.choices[0].logprobs.content]
    assert len(whole) == 5 and streamed == whole


def test_logprobs_of_a_chat_have_bytes_and_the_likeliest_first(server):
    answer = server.client().chat.completions.create(
        model="leaf", messages=HELLO, max_tokens=3, logprobs=True, top_logprobs=4
    )
    content = answer.choices[0].logprobs.content
    assert len(content) == 3
    assert [one.logprob for one in content] == [-1.0] * 3
    assert [one.logprob for one in content[0].top_logprobs] == [-0.5, -1.0, -2.5, -3.5]
    assert bytes(content[0].bytes).decode("utf-8", "replace") == content[0].token


def test_logprobs_of_an_impossible_token_are_finite(server):
    answer = server.client().completions.create(model="leaf", prompt="A", max_tokens=1, logprobs=5)
    assert -9999.0 in answer.choices[0].logprobs.top_logprobs[0].values()


def test_logprobs_of_a_completion_have_offsets_into_the_text(server):
    choice = server.client().completions.create(model="leaf", prompt="A", max_tokens=6, logprobs=2).choices[0]
    logprobs = choice.logprobs
    assert "".join(logprobs.tokens) == choice.text
    assert logprobs.text_offset == [sum(map(len, logprobs.tokens[:i])) for i in range(6)]
    assert all(2 <= len(top) <= 3 for top in logprobs.top_logprobs)
    pieces = list(server.client().completions.create(model="leaf", prompt="A", max_tokens=6, logprobs=2, stream=True))
    assert [one for piece in pieces for one in piece.choices[0].logprobs.text_offset] == logprobs.text_offset


def test_echo_puts_the_prompt_before_the_answer_with_its_logprobs(server):
    plain = server.client().completions.create(model="leaf", prompt="Say it", max_tokens=3).choices[0].text
    choice = server.client().completions.create(
        model="leaf", prompt="Say it", max_tokens=3, echo=True, logprobs=1
    ).choices[0]  # fmt: skip
    assert choice.text == "Say it" + plain
    assert choice.logprobs.token_logprobs[0] is None and "".join(choice.logprobs.tokens) == choice.text
    alone = server.client().completions.create(model="leaf", prompt="Say it", max_tokens=0, echo=True).choices[0]
    assert alone.text == "Say it"


def test_many_prompts_are_answered_in_their_order(server):
    answer = server.client().completions.create(model="leaf", prompt=["One", "Two", "Three"], max_tokens=4, n=2, seed=1)
    texts = [choice.text for choice in sorted(answer.choices, key=lambda one: one.index)]
    singles = [
        choice.text
        for prompt in ("One", "Two", "Three")
        for choice in server.client().completions.create(model="leaf", prompt=prompt, max_tokens=4, n=2, seed=1).choices
    ]
    assert texts == singles and len(set(texts)) == 6
    streamed = dict.fromkeys(range(6), "")
    for chunk in server.client().completions.create(
        model="leaf", prompt=["One", "Two", "Three"], max_tokens=4, n=2, seed=1, stream=True
    ):
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    assert [streamed[index] for index in range(6)] == singles


def test_token_ids_are_a_prompt_too(server):
    ids = server.engine.tokenizer.encode("Hello there", add_special_tokens=True)
    by_text = server.client().completions.create(model="leaf", prompt="Hello there", max_tokens=4).choices[0].text
    by_ids = server.client().completions.create(model="leaf", prompt=ids, max_tokens=4).choices[0].text
    lists = server.client().completions.create(model="leaf", prompt=[ids, ids[:1]], max_tokens=4).choices
    assert by_text == by_ids == lists[0].text != lists[1].text


def test_models_are_listed(server):
    assert [model.id for model in server.client().models.list()] == ["leaf"]
    assert server.client().models.retrieve("leaf").max_model_len == 2048


@pytest.mark.parametrize(
    ("arguments", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"n": 0}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"stop": ["a"] * 65}, "stop"),
        ({"logit_bias": {"999999": 1}}, "logit_bias"),
        ({"extra_body": {"top_k": "many"}}, "top_k"),
        ({"extra_body": {"structured_outputs": {"json": {"type": 7}}}}, "structured_outputs"),
        ({"extra_body": {"priority": 2**70}}, "priority"),
        ({"seed": 2**63}, "seed"),
        ({"response_format": {"type": "json"}}, "response_format"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "any"}, "tool_choice"),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, dict) else value,
)
def test_a_wrong_value_is_refused_by_name(server, arguments, param):
    with pytest.raises(openai.BadRequestError) as caught:
        server.client().chat.completions.create(model="leaf", messages=HELLO, **arguments)
    assert param in (caught.value.param or "") and caught.value.type == "BadRequestError"


def test_an_unknown_model_is_not_found(server):
    with pytest.raises(openai.NotFoundError, match="leaf"):
        server.client().chat.completions.create(model="gpt-17", messages=HELLO)


def test_a_prompt_that_is_too_long_is_refused_before_the_stream(server):
    with pytest.raises(openai.BadRequestError, match="2048"):
        server.client().completions.create(model="leaf", prompt=[7] * 5000, stream=True)


def test_unknown_and_idle_fields_are_named_in_warnings(server):
    answer = server.client().chat.completions.create(
        model="leaf", messages=HELLO, max_tokens=1, user="me", extra_body={"temprature": 1}
    )
    assert any("temprature" in one and "temperature" in one for one in answer.warnings)
    assert "user has no effect" in answer.warnings


def test_each_error_is_the_clients_own_class(server, monkeypatch):
    with pytest.raises(openai.APIConnectionError):
        server.client(base_url="http://127.0.0.1:1/v1").models.list()
    monkeypatch.setattr(server.engine, "fails_after", 1)
    with pytest.raises(openai.InternalServerError):
        server.client().completions.create(model="leaf", prompt="Go", max_tokens=5)
    stream = server.client().completions.create(model="leaf", prompt="Go", max_tokens=5, stream=True)
    with pytest.raises(openai.APIError, match="failed inside the engine"):
        list(stream)


def test_the_example_of_the_readme_runs(server, capsys):
    page = (Path(__file__).parents[2] / "README.md").read_text()
    (example,) = re.findall(r"^```py\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    code = example.replace('model="leaf"', 'model="leaf", max_tokens=5').replace("http://127.0.0.1:8000", server.url)
    exec(compile(code, "example", "exec"), {})
    assert capsys.readouterr().out == expected(server, server.engine.prompts[-1], 5) + "\n"
    (body,) = re.findall(r"-d '(\{.*?\})'", page)
    url = f"{server.url}/v1/chat/completions"
    answer = httpx.post(url, json={**json.loads(body), "max_tokens": 5})
    assert answer.json()["choices"][0]["message"]["content"] and "warnings" not in answer.text


def test_a_client_that_times_out_leaves_nothing_running(server):
    server.engine.holds = True
    try:
        with pytest.raises(openai.APITimeoutError):
            server.client(timeout=0.2).chat.completions.create(model="leaf", messages=HELLO, max_tokens=5)
        server.wait_until(lambda: not server.engine.live)
    finally:
        server.engine.holds = False
    server.wait_until(lambda: server.state.admission.num_answers == 0)


def test_a_stream_that_times_out_leaves_nothing_running(server):
    server.engine.holds = True
    try:
        with pytest.raises(openai.APITimeoutError):
            server.client(timeout=0.2).chat.completions.create(model="leaf", messages=HELLO, max_tokens=5, stream=True)
        server.wait_until(lambda: not server.engine.live)
    finally:
        server.engine.holds = False
    server.wait_until(lambda: server.state.admission.num_answers == 0)


@pytest.mark.parametrize("n", [1, 2])
def test_a_stream_that_is_closed_early_leaves_nothing_running(server, n):
    stream = server.client().completions.create(model="leaf", prompt="Go", max_tokens=2000, n=n, stream=True)
    assert next(iter(stream)).choices
    stream.close()
    server.wait_until(lambda: not server.engine.live and not server.state.running)
    assert server.state.admission.num_answers == 0


def test_64_streams_at_once_each_get_their_own_answer(server):
    async def ask(client: openai.AsyncOpenAI, number: int) -> tuple[list[int], str]:
        ids = [50 + number, 60 + number, 70]
        text = ""
        async for chunk in await client.completions.create(model="leaf", prompt=ids, max_tokens=12, stream=True):
            text += chunk.choices[0].text
        return ids, text

    async def ask_all() -> list[tuple[list[int], str]]:
        http = httpx.AsyncClient(limits=httpx.Limits(max_connections=64))
        async with server.async_client(http_client=http) as client:
            return await asyncio.gather(*(ask(client, number) for number in range(64)))

    for ids, text in asyncio.run(ask_all()):
        assert text == expected(server, ids, 12)
