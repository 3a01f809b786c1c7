"""Random mixes of features: each request gives the same answer in a crowd under pressure as alone.

The crowd is one batch with small pages, a small pool (so that requests are preempted), prompts cut into chunks and
prefixes shared; alone is one request at a time on a fresh cache.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from quire import LLM, RequestOutput, SamplingParams
from tests.models.checkpoints import make_checkpoint

NUM_REQUESTS = 48
TOLERANCE = 1e-4


def random_params(rng: random.Random, vocab_size: int) -> SamplingParams:
    """Any mix of the parameters that Quire honours."""

    def maybe(value: object, default: object = None, chance: float = 0.3) -> object:
        return value if rng.random() < chance else default

    some_ids = rng.sample(range(vocab_size), 40)
    fields = {
        "temperature": rng.choice([0.0, 0.7, 1.0, 1.5]),
        "seed": rng.randrange(2**31),
        "max_tokens": rng.choice([1, 2, 9, 30]),
        "top_k": maybe(rng.randint(1, 60), 0),
        "top_p": maybe(rng.uniform(0.3, 1.0), 1.0),
        "min_p": maybe(rng.uniform(0.0, 0.2), 0.0),
        "presence_penalty": maybe(rng.uniform(-1, 2), 0.0),
        "frequency_penalty": maybe(rng.uniform(-1, 2), 0.0),
        "repetition_penalty": maybe(rng.uniform(0.8, 1.5), 1.0),
        "logit_bias": maybe({token: rng.uniform(-8, 8) for token in some_ids[:5]}),
        "allowed_token_ids": maybe(some_ids, chance=0.15),
        "bad_words": maybe(["a", "the cat", "q"]),
        "stop": maybe(["e", "zz"]),
        "stop_token_ids": maybe(some_ids[:10]),
        "include_stop_str_in_output": rng.random() < 0.5,
        "ignore_eos": rng.random() < 0.5,
        "logprobs": maybe(rng.choice([0, 1, 5])),
        "prompt_logprobs": maybe(rng.choice([0, 2])),
        "skip_special_tokens": rng.random() < 0.8,
    }
    if fields["temperature"] > 0:
        fields["n"] = maybe(3, 1, 0.2)
    fields["min_tokens"] = maybe(rng.randint(0, fields["max_tokens"]), 0)
    return SamplingParams(**fields)


def random_prompt(rng: random.Random, vocab_size: int, shared: list[int]) -> dict[str, object]:
    """A prompt of 1 to 120 tokens, often with a beginning that others have too, sometimes salted."""
    head = shared[: rng.choice([0, 0, 7, 8, 40])]
    ids = head + [rng.randrange(vocab_size) for _ in range(rng.randint(1, 80))]
    return {"prompt_token_ids": ids} | ({"cache_salt": "s"} if rng.random() < 0.2 else {})


def assert_same(crowd: RequestOutput, alone: RequestOutput) -> None:
    for one, other in zip(crowd.outputs, alone.outputs, strict=True):
        assert one.token_ids == other.token_ids
        assert (one.text, one.finish_reason, one.stop_reason) == (other.text, other.finish_reason, other.stop_reason)
        assert_same_logprobs(one.logprobs, other.logprobs)
    assert_same_logprobs(crowd.prompt_logprobs, alone.prompt_logprobs)


def assert_same_logprobs(one: list | None, other: list | None) -> None:
    assert (one is None) == (other is None)
    for line, other_line in zip(one or [], other or [], strict=True):
        assert (line is None) == (other_line is None)
        for token, entry in (line or {}).items():
            if token in other_line:  # near ties may swap which token is last
                assert entry.logprob == pytest.approx(other_line[token].logprob, abs=TOLERANCE)
        assert len(set(line or ()) - set(other_line or ())) <= 1


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen2")
    make_checkpoint("qwen2", path)
    return path


@pytest.mark.parametrize("seed", range(3), ids=lambda seed: f"seed {seed}")
def test_a_crowd_under_pressure_changes_no_answer(checkpoint: Path, seed: int):
    rng = random.Random(seed)
    settings = {"dtype": "float32", "max_model_len": 160, "block_size": 16, "num_threads": 1}
    with LLM(str(checkpoint), max_num_seqs=4, **settings) as llm:
        vocab_size = len(llm.get_tokenizer())
        shared = [rng.randrange(vocab_size) for _ in range(40)]
        prompts = [random_prompt(rng, vocab_size, shared) for _ in range(NUM_REQUESTS)]
        params = [random_params(rng, vocab_size) for _ in range(NUM_REQUESTS)]
        alone = []
        for prompt, one in zip(prompts, params):
            llm.reset_prefix_cache()
            alone += llm.generate(prompt, one, use_tqdm=False)
    pressure = {"max_num_batched_tokens": 48, "num_gpu_blocks_override": 26, "scheduler_reserve_full_isl": False}
    with LLM(str(checkpoint), max_num_seqs=16, **pressure, **settings) as llm:
        crowd = llm.generate(prompts, params, use_tqdm=False)
    assert sum(output.metrics.num_preemptions for output in crowd) > 0
    assert any(output.num_cached_tokens for output in crowd)
    for one, other in zip(crowd, alone):
        assert_same(one, other)
