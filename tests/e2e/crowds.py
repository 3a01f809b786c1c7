"""Many short requests that grow, and what they get of an engine whose pages do not suffice for all."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire import LLM, SamplingParams
from tests.e2e.same_bits import Answer, answers

COUNT, MAX_TOKENS = 130, 90


def crowd() -> tuple[list[Any], list[SamplingParams]]:
    """Short prompts that grow: all fit at first, and few in the end. Every fourth asks for its prompt's lines."""
    rng = random.Random(3)
    prompts = [{"prompt_token_ids": [rng.randrange(250) for _ in range(rng.randint(1, 30))]} for _ in range(COUNT)]
    params = [
        SamplingParams(
            max_tokens=MAX_TOKENS, detokenize=False, ignore_eos=True, logprobs=1, seed=i, temperature=0.9 * (i % 2),
            repetition_penalty=1.2 if i % 3 == 0 else 1.0, presence_penalty=0.5 if i % 5 == 0 else 0.0,
            prompt_logprobs=1 if i % 4 == 0 else None,
        )
        for i in range(COUNT)
    ]  # fmt: skip
    return prompts, params


@dataclass
class Found:
    """What a crowd got, with the lines of its prompts, and how it got there."""

    answers: list[tuple[Answer, Any]]
    num_preemptions: int = 0
    num_swap_preemptions: int = 0
    num_bytes: tuple[int, int] = (0, 0)


def run(model: Path, arguments: Callable[[int], dict[str, Any]] = lambda i: {}, **settings: Any) -> Found:
    """Send the crowd to an engine with these settings; request i with `arguments(i)` besides."""
    prompts, params = crowd()
    found, outputs = Found([]), {}
    with LLM(str(model), max_model_len=128, block_size=16, **settings) as llm:
        engine = llm.llm_engine
        for i, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
            engine.add_request(str(i), prompt, one, **arguments(i))
        while engine.has_unfinished_requests():
            outputs.update({output.request_id: output for output in engine.step() if output.finished})
            stats = engine.last_stats
            found.num_preemptions += stats.num_preemptions
            found.num_swap_preemptions += stats.num_swap_preemptions
            out, back = found.num_bytes
            found.num_bytes = out + stats.swapped_out_bytes, back + stats.swapped_in_bytes
    in_order = [outputs[str(i)] for i in range(COUNT)]
    found.answers = list(zip(answers(in_order), [output.prompt_logprobs for output in in_order], strict=True))
    return found
