"""A request's tokens depend on the request alone: not on its batch, its chunks, or preemption."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from quire import LLM, SamplingParams
from tests.models.checkpoints import make_checkpoint

PROMPT_LEN = 40
MAX_TOKENS = 24


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen3")
    make_checkpoint("qwen3", path)
    return path


def seeded(seed: int) -> SamplingParams:
    return SamplingParams(
        temperature=1.0,
        top_p=0.95,
        top_k=50,
        min_p=0.01,
        presence_penalty=0.3,
        repetition_penalty=1.1,
        seed=seed,
        max_tokens=MAX_TOKENS,
        ignore_eos=True,
    )


def prompts(count: int) -> list[dict[str, list[int]]]:
    rng = random.Random(7)
    return [{"prompt_token_ids": [rng.randrange(100) for _ in range(PROMPT_LEN)]} for _ in range(count)]


def engine(path: Path, **settings: object) -> LLM:
    return LLM(str(path), dtype="float32", max_model_len=128, block_size=16, num_threads=1, **settings)


@pytest.fixture(scope="module")
def alone(checkpoint: Path) -> list[list[int]]:
    """Tokens of 12 seeded requests, one at a time."""
    with engine(checkpoint, enable_prefix_caching=False) as llm:
        singles = [llm.generate(p, seeded(i), use_tqdm=False)[0] for i, p in enumerate(prompts(12))]
    return [output.outputs[0].token_ids for output in singles]


def tokens_of(outputs: list) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs[:12]]


def test_in_a_batch_of_64(checkpoint, alone):
    with engine(checkpoint, max_num_seqs=64) as llm:
        outputs = llm.generate(prompts(64), [seeded(i) for i in range(64)], use_tqdm=False)
    assert tokens_of(outputs) == alone


def test_with_prompts_cut_into_chunks_of_seven_tokens(checkpoint, alone):
    with engine(checkpoint, max_num_seqs=4, max_num_batched_tokens=7) as llm:
        outputs = llm.generate(prompts(12), [seeded(i) for i in range(12)], use_tqdm=False)
    assert tokens_of(outputs) == alone


def test_preempted(checkpoint, alone):
    with engine(checkpoint, max_num_seqs=12, num_gpu_blocks_override=31) as llm:
        outputs = llm.generate(prompts(36), [seeded(i) for i in range(36)], use_tqdm=False)
    assert sum(output.metrics.num_preemptions for output in outputs) >= 5
    assert any(output.metrics.num_preemptions for output in outputs[:12])  # those that are compared
    assert tokens_of(outputs) == alone


def test_with_the_prompt_cached(checkpoint, alone):
    with engine(checkpoint, max_num_seqs=12) as llm:
        llm.generate(prompts(12), SamplingParams(max_tokens=1, temperature=0), use_tqdm=False)
        outputs = llm.generate(prompts(12), [seeded(i) for i in range(12)], use_tqdm=False)
    assert all(output.num_cached_tokens for output in outputs)
    assert tokens_of(outputs) == alone
