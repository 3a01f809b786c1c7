"""Requests of every kind that drafts must not change, and their answers to the last bit."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quire import LLM, RequestOutput, SamplingParams
from quire.core.structured_outputs import StructuredOutputsParams
from tests.structured.forced_tools import Forcing

WORDS = ("the", "child", "walked", "to", "a", "river", "and", "saw", "seven", "boats", "Name", "is", "7", "+", "12")
FORMS: tuple[dict[str, Any], ...] = (
    {"regex": "[a-z]{3,9} [0-9]{2}( [a-z]{2,5}){3,9}"},
    {"choice": ["yes, and the horse went home", "yes, and the horse stayed", "perhaps"]},
    {"json": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}, "required": ["a"]}},
    {"grammar": 'root ::= line line line\nline ::= "la " ("fa" | "so" | "ti") " " ("do" | "re") ". "'},
)
SEEDED = {"temperature": 1.0}
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
    "forced tools": {},
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


def make_requests(engine: Any, count: int, seed: int = 0) -> list[Asked]:
    """`count` requests of all kinds in turn; every third begins like others.

    Args:
        engine: has a tokenizer and, for forced tools, a template.
    """
    rng, forcing = random.Random(seed), Forcing(engine, ("hermes", "mistral", "qwen3_coder"))
    starts = [_words(rng, 60) for _ in range(3)]
    kinds = [kind for kind in KINDS if kind != "forced tools" or engine.chat_template is not None]
    requests = []
    for i in range(count):
        kind = kinds[i % len(kinds)]
        if kind == "forced tools":
            asked = forcing.request(rng)
            requests.append(Asked(kind, asked.prompt, asked.params))
            continue
        text = (rng.choice(starts) if rng.random() < 0.3 else "") + _words(rng, rng.choice((2, 9, 30, 90)))
        fields = {name: _one_of(value, rng) for name, value in KINDS[kind].items()}
        if form := fields.get("structured_outputs"):
            fields["structured_outputs"] = StructuredOutputsParams(**form, disable_any_whitespace=True)
        common = {"max_tokens": rng.choice((1, 8, 30, 48)), "seed": i, "ignore_eos": kind != "structured"}
        params = SamplingParams(**{**common, **fields})
        requests.append(Asked(kind, engine.tokenizer.encode(text, add_special_tokens=False), params))
    return requests


def _words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choices(WORDS, k=count))


def _one_of(value: Any, rng: random.Random) -> Any:
    return rng.choice(value) if isinstance(value, (list, tuple)) else value


def generate(llm: LLM, requests: Sequence[Asked]) -> list[Answer]:
    """The answers, each to the last bit."""
    prompts = [{"prompt_token_ids": one.prompt} for one in requests]
    outputs = llm.generate(prompts, [one.params for one in requests], use_tqdm=False)
    return [answer_of(output) for output in outputs]


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
