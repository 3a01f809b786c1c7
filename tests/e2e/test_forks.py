"""Many answers to one prompt are the answers that the same requests get alone, whatever they share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.core.outputs import CompletionOutput
from tests.models.checkpoints import make_checkpoint

NUM_ANSWERS = 5
PROMPT = [5 + i % 90 for i in range(43)]
SETTINGS: dict[str, Any] = {"dtype": "float32", "max_model_len": 128, "block_size": 16, "num_threads": 1}

CASES: dict[str, dict[str, Any]] = {
    "caching off": {"enable_prefix_caching": False},
    "caching on": {},
    "in chunks": {"enable_prefix_caching": False, "max_num_batched_tokens": 9},
    "preempted": {"enable_prefix_caching": False, "num_gpu_blocks_override": 14},
    "by turns": {"enable_prefix_caching": False, "max_num_seqs": 2},
}


def params(seed: int, **values: Any) -> SamplingParams:
    return SamplingParams(temperature=1.0, seed=seed, max_tokens=20, ignore_eos=True, logprobs=2, **values)


def bits_of(one: CompletionOutput, backend: str) -> tuple[Any, ...]:
    """Tokens and, where the backend promises their bits in any batch, log-probabilities."""
    assert one.logprobs is not None
    if backend != "native_cpu":
        return (one.token_ids,)
    return one.token_ids, [{i: value.logprob for i, value in line.items()} for line in one.logprobs]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen3")
    make_checkpoint("qwen3", path)
    return path


@pytest.fixture(scope="module", params=["native_cpu", "torch_reference"])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def alone(checkpoint: Path, backend: str) -> list[tuple[Any, ...]]:
    with LLM(str(checkpoint), attention_backend=backend, enable_prefix_caching=False, **SETTINGS) as llm:
        outputs = [llm.generate(PROMPT, params(3 + i), use_tqdm=False)[0] for i in range(NUM_ANSWERS)]
    return [bits_of(output.outputs[0], backend) for output in outputs]


@pytest.mark.parametrize("case", CASES)
def test_many_answers_have_the_bits_of_single_ones(checkpoint: Path, backend: str, alone: list[Any], case: str) -> None:
    with LLM(str(checkpoint), attention_backend=backend, **SETTINGS, **CASES[case]) as llm:
        crowd = [[7 + i] * 30 for i in range(4)] if case == "preempted" else []
        single = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
        (output, *others) = llm.generate(
            [PROMPT, *crowd], [params(3, n=NUM_ANSWERS), *[single] * len(crowd)], use_tqdm=False
        )
    assert [bits_of(one, backend) for one in output.outputs] == alone
    if case == "preempted":
        assert sum(one.metrics.num_preemptions for one in [output, *others]) > 0


def test_logprobs_of_the_prompt_come_with_the_first_answer(checkpoint: Path, alone: list[Any], backend: str) -> None:
    with LLM(str(checkpoint), attention_backend=backend, **SETTINGS) as llm:
        (output,) = llm.generate(PROMPT, params(3, n=NUM_ANSWERS, prompt_logprobs=1), use_tqdm=False)
    assert output.prompt_logprobs is not None and len(output.prompt_logprobs) == len(PROMPT)
    assert [bits_of(one, backend) for one in output.outputs] == alone
