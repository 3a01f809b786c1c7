"""Requests and settings under which several ranks must give the bytes of one. Used by the tests and the matrix."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from quire import LLM, SamplingParams
from quire.core.outputs import RequestOutput
from quire.core.sampling_params import StructuredOutputsParams
from tests.parallel.ranks import ranks_as_threads

Answers = list[tuple[tuple[int, ...], tuple[float, ...], tuple[float, ...]]]

SETTINGS: Mapping[str, Any] = {
    "max_model_len": 384, "block_size": 16, "max_num_seqs": 8, "num_threads": 1, "max_num_batched_tokens": 128,
    "num_gpu_blocks_override": 300,
}  # fmt: skip
SPECULATION = {"method": "suffix", "num_speculative_tokens": 4}
PREEMPTED = {"num_gpu_blocks_override": 26, "scheduler_reserve_full_isl": False, "enable_prefix_caching": False}
# Name -> settings of the engine with several ranks, whose answers are those of one rank without them.
CIRCUMSTANCES: Mapping[str, Mapping[str, Any]] = {
    "as one": {},
    "call by call": {"enforce_eager": True},
    "chunks of 7": {"max_num_batched_tokens": 8},
    "preempted": PREEMPTED,
    "host memory": {"kv_offloading_size": 0.05, **PREEMPTED, "enable_prefix_caching": True},
    "suffixes as drafts": {"speculative_config": SPECULATION},
    "swapped, with suffixes": {
        "preemption_mode": "swap",
        "swap_space": 0.05,
        **PREEMPTED,
        "speculative_config": SPECULATION,
    },
    "two threads": {"num_threads": 2},
}
WHOLE: Mapping[str, Any] = {"enable_expert_parallel": True}
# As above, for mixtures.
WHOLE_EXPERTS: Mapping[str, Mapping[str, Any]] = {
    "whole experts": WHOLE,
    "whole experts, call by call": {**WHOLE, "enforce_eager": True},
    "experts in turns, swapped, with suffixes": {
        **WHOLE, "expert_placement_strategy": "round_robin", **CIRCUMSTANCES["swapped, with suffixes"],
    },
}  # fmt: skip
PATTERN = r"[a-f]{4,12}( [0-9]{2}){1,3}"


def requests(vocab_size: int, *, max_tokens: int = 10) -> tuple[list[Any], list[Any]]:
    """Greedy and drawn ones, with penalties, log-probabilities of the prompt, and a shared beginning."""
    rng = random.Random(3)
    shared = [rng.randrange(5, vocab_size) for _ in range(40)]
    prompts = [
        {"prompt_token_ids": (shared if i % 2 else []) + [rng.randrange(5, vocab_size) for _ in range(1 + 11 * i)]}
        for i in range(7)
    ]
    kinds: list[dict[str, Any]] = [
        {"temperature": 0}, {"temperature": 0.9, "top_p": 0.9, "top_k": 30}, {"temperature": 0, "prompt_logprobs": 1},
        {"temperature": 0, "presence_penalty": 1.0}, {"temperature": 1.0, "n": 2}, {"temperature": 0.8, "min_p": 0.05},
        {"temperature": 0, "logit_bias": {7: 3.0}},
    ]  # fmt: skip
    params = [
        SamplingParams(max_tokens=max_tokens, ignore_eos=True, logprobs=1, seed=i, **kind)
        for i, kind in enumerate(kinds)
    ]
    return prompts, params


def answers(
    model: str | Path,
    vocab_size: int,
    num_ranks: int,
    *,
    num_stages: int = 1,
    structured: bool = False,
    **settings: Any,
) -> Answers:
    """Tokens and log-probabilities of all requests, twice: the second time prefixes are cached."""
    prompts, params = requests(vocab_size)
    if structured:
        params[0] = SamplingParams(
            max_tokens=24, temperature=0, logprobs=1, structured_outputs=StructuredOutputsParams(regex=PATTERN)
        )
    found: Answers = []
    sizes = {"tensor_parallel_size": num_ranks, "pipeline_parallel_size": num_stages}
    with ranks_as_threads(), LLM(str(model), **{**SETTINGS, **sizes, **settings}) as llm:
        for _ in range(2):
            found += answers_of(llm.generate(prompts, params, use_tqdm=False))
    return found


def answers_of(outputs: Iterable[RequestOutput]) -> Answers:
    """Tokens and log-probabilities, of the prompts too."""
    found: Answers = []
    for output in outputs:
        read = [line for line in output.prompt_logprobs or [] if line is not None]
        of_prompt = tuple(entry.logprob for line in read for entry in line.values())
        for completion in output.outputs:
            assert completion.logprobs is not None
            lines = zip(completion.logprobs, completion.token_ids, strict=True)
            scores = tuple(line[token].logprob for line, token in lines)
            found.append((tuple(completion.token_ids), scores, of_prompt))
    return found
