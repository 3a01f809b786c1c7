"""Requests of every kind that drafts must not change, and their answers to the last bit."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quire import LLM, RequestOutput, SamplingParams
from quire.config.server import ApiConfig, LimitsConfig
from quire.core.structured_outputs import StructuredOutputsParams
from quire.server.chat.parsing import Parsing
from quire.server.chat.protocol.chat import ChatRequest, chat_params
from quire.server.chat.protocol.warnings import Warnings
from tests.structured.forced_tools import Forcing

WORDS = ("the", "child", "walked", "to", "a", "river", "and", "saw", "seven", "boats", "Name", "is", "7", "+", "12")
FORMS: tuple[dict[str, Any], ...] = (
    {"regex": "[a-z]{3,9} [0-9]{2}( [a-z]{2,5}){3,9}"},
    {"choice": ["yes, and the horse went home", "yes, and the horse stayed", "perhaps"]},
    {"json": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}, "required": ["a"]}},
    {"grammar": 'root ::= line line line\nline ::= "la " ("fa" | "so" | "ti") " " ("do" | "re") ". "'},
)
SEEDED = {"temperature": 1.0}
FORCED_TOOLS, BUDGET = "forced tools", "reasoning budget"  # are made by a server's own parts
# What a kind adds to a request; a list stands for one of its entries.
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded at 0.7": {"temperature": 0.7},
    "seeded at 1.0": SEEDED,
    "top-p": {**SEEDED, "top_p": 0.9, "top_k": [0, 20], "min_p": [0, 0.05]},
    "penalties": {"temperature": [0.0, 0.7], "repetition_penalty": 1.2, "presence_penalty": 0.4,
                  "frequency_penalty": 0.3},
    "logprobs": {"temperature": [0.0, 1.0], "logprobs": [0, 3]},
    "prompt logprobs": {**SEEDED, "logprobs": 1, "prompt_logprobs": 2},
    "structured": {**SEEDED, "structured_outputs": FORMS},
    FORCED_TOOLS: {},
    BUDGET: {},
    "n of 3": {**SEEDED, "n": 3, "logprobs": 0},
    "stop strings": {"temperature": [0.0, 1.0], "stop": [["boat"], ["er", "and"], ["a"]]},
    "stop ids": {**SEEDED, "stop_token_ids": [[40, 300, 301, 305]], "logprobs": 0},
    "min_tokens": {**SEEDED, "min_tokens": 20, "max_tokens": 48, "ignore_eos": False, "stop": [["e"]]},
    "bias and bad words": {"temperature": [0.0, 0.7], "logit_bias": {40: 4.0, 41: -100.0}, "bad_words": [[" the"]]},
    "repeats itself": {"temperature": 0.7, "repetition_penalty": 0.6, "logprobs": 0},
}  # fmt: skip
Answer = tuple[Any, ...]


@dataclass(frozen=True)
class Asked:
    """A request, and of which kind it is."""

    kind: str
    prompt: list[int]
    params: SamplingParams


def make_requests(engine: Any, count: int, seed: int = 0, longest: int | None = None) -> list[Asked]:
    """`count` requests of all kinds in turn; every third begins like others.

    Args:
        engine: has a tokenizer and, for forced tools, a template.
        longest: prompts that are plain texts are cut to so many tokens.
    """
    rng, forcing = random.Random(seed), Forcing(engine, ("hermes", "mistral", "qwen3_coder"))
    starts = [_words(rng, 60) for _ in range(3)]
    kinds = [kind for kind in KINDS if kind not in (FORCED_TOOLS, BUDGET) or engine.chat_template is not None]
    requests = []
    for i in range(count):
        kind = kinds[i % len(kinds)]
        if kind == FORCED_TOOLS:
            asked = forcing.request(rng)
            requests.append(Asked(kind, asked.prompt, asked.params))
            continue
        if kind == BUDGET:
            requests.append(_thinking(engine, rng))
            continue
        text = (rng.choice(starts) if rng.random() < 0.3 else "") + _words(rng, rng.choice((2, 9, 30, 90)))
        fields = {name: _one_of(value, rng) for name, value in KINDS[kind].items()}
        if form := fields.get("structured_outputs"):
            fields["structured_outputs"] = StructuredOutputsParams(**form, disable_any_whitespace=True)
        max_tokens = (48, 8, 30, 1)[i // len(kinds) % 4]
        common = {"max_tokens": max_tokens, "seed": i, "ignore_eos": kind != "structured"}
        params = SamplingParams(**{**common, **fields})
        requests.append(Asked(kind, engine.tokenizer.encode(text, add_special_tokens=False)[:longest], params))
    return requests


def _thinking(engine: Any, rng: random.Random) -> Asked:
    """Thinks so many tokens at most, then answers, some in a form."""
    task = f"What is {rng.randrange(90)} + {rng.randrange(90)}?"
    fields: dict[str, Any] = (
        {"structured_outputs": {"regex": "[0-9]{1,3}( is it[.]){2,4}"}} if rng.random() < 0.5 else {}
    )
    body = ChatRequest(
        messages=[{"role": "system", "content": "/think"}, {"role": "user", "content": task}], max_tokens=64,
        temperature=rng.choice((0.0, 1.0)), seed=rng.randrange(1 << 40), logprobs=True,
        thinking_token_budget=rng.choice((0, 3, 12, 30)), **fields,
    )  # fmt: skip
    plan = Parsing(ApiConfig(reasoning_parser="think"), engine).plan(body, Warnings())
    assert plan is not None, "thinking is read"
    text = engine.chat_template.render(body.messages)
    prompt = engine.tokenizer.encode(text, add_special_tokens=False)
    params = chat_params(body, {}, LimitsConfig())
    plan.constrain(params, prompt)
    return Asked(BUDGET, prompt, params)


def _words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choices(WORDS, k=count))


def _one_of(value: Any, rng: random.Random) -> Any:
    return rng.choice(value) if isinstance(value, (list, tuple)) else value


def generate(llm: LLM, requests: Sequence[Asked]) -> list[RequestOutput]:
    """The answers."""
    prompts = [{"prompt_token_ids": one.prompt} for one in requests]
    return llm.generate(prompts, [one.params for one in requests], use_tqdm=False)


def answer_of(output: RequestOutput) -> Answer:
    """Texts, tokens, ends and log-probabilities of a request."""
    return (
        _exact(output.prompt_logprobs),
        *(
            (one.text, tuple(one.token_ids), one.finish_reason, one.stop_reason, _exact(one.logprobs))
            for one in output.outputs
        ),
    )


def _exact(logprobs: Any) -> Any:
    if logprobs is None:
        return None
    return [
        None if line is None else [(token, value.logprob.hex(), value.rank) for token, value in line.items()]
        for line in logprobs
    ]


def sequences(requests: Sequence[Asked], answers: Sequence[Answer]) -> list[tuple[list[int], list[int]]]:
    """(prompt, output) of every sequence of these answers."""
    return [
        (asked.prompt, list(completion[1]))
        for asked, answer in zip(requests, answers, strict=True)
        for completion in answer[1:]
    ]
