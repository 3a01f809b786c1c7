"""Tokens and log-probabilities are the same bits alone, in a crowd, in chunks, cached, preempted, on every tier."""

from __future__ import annotations

from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.kernels.native.library import supported_tiers
from tests.e2e.same_bits import CIRCUMSTANCES, Answer, make_requests, run
from tests.effort import effort

REQUESTS = make_requests(24, 3000, *effort((6, 100), (12, 300)))
CASES: dict[str, dict[str, Any]] = {
    **{name: settings for name, settings in CIRCUMSTANCES.items() if name != "alone"},
    **{f"tier {tier}": {"max_num_seqs": 17, "kernel_tier": tier} for tier in supported_tiers()},
}
CASES["preempted"] = {"max_num_seqs": 17, "num_gpu_blocks_override": 20, "scheduler_reserve_full_isl": False}


@pytest.fixture(scope="module", params=[None, "int8", "int4"], ids=["bf16", "int8", "int4"])
def expected(request: pytest.FixtureRequest) -> tuple[str | None, list[Answer]]:
    return request.param, run("leaf", *REQUESTS, quantization=request.param, **CIRCUMSTANCES["alone"])[0]


@pytest.mark.parametrize("name", CASES)
def test_answers_are_the_same_bits(expected: tuple[str | None, list[Answer]], name: str):
    quantization, alone = expected
    count = effort(8, 24) if name == "tier portable" else 24  # it is slow
    prompts, params = REQUESTS
    found, num_preemptions = run(
        "leaf", prompts[:count], params[:count], warm=name == "cached", quantization=quantization, **CASES[name]
    )
    assert found == alone[:count]
    assert num_preemptions or name != "preempted"


@pytest.mark.parametrize("max_num_batched_tokens", [7, 2048])
def test_tokens_have_the_same_logprobs_in_a_prompt_as_when_they_were_sampled(max_num_batched_tokens: int):
    prompt = list(range(5, 45))
    settings = {"enable_prefix_caching": False, "max_model_len": 512, "attention_backend": "native_cpu"}
    with LLM("leaf", max_num_seqs=4, max_num_batched_tokens=max_num_batched_tokens, **settings) as llm:
        sampling = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=5)
        (sampled,) = llm.generate({"prompt_token_ids": prompt}, sampling, use_tqdm=False)
        whole = {"prompt_token_ids": [*prompt, *sampled.outputs[0].token_ids]}
        (read,) = llm.generate(whole, SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=5), use_tqdm=False)
    assert lines(read.prompt_logprobs[len(prompt) :]) == lines(sampled.outputs[0].logprobs)


def lines(logprobs: list[Any]) -> list[dict[int, tuple[float, int]]]:
    return [{token: (entry.logprob, entry.rank) for token, entry in line.items()} for line in logprobs]
