"""Greedy tokens and log-probabilities equal those of transformers, in float32, for every family.

Tokens are compared by teacher forcing: transformers scores prompt + our output in one pass, and each of our
tokens must be its argmax at that place. By induction that is the same as comparing two greedy runs.
"""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest
import torch

from quire import LLM, RequestOutput, SamplingParams
from tests.effort import effort
from tests.models.checkpoints import make_checkpoint

FAMILIES = ("llama", "llama3", "mistral", "qwen2", "qwen3")
NUM_PROMPTS = 32
MAX_TOKENS = effort(40, 64)
MAX_MODEL_LEN = 704
TOLERANCE = 1e-4
GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=1)


class Reference:
    """transformers' scores for the sequences that Quire produced."""

    def __init__(self, path: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()

    @torch.inference_mode()
    def check(self, output: RequestOutput) -> None:
        """Every output token is the argmax, and its log-probability agrees."""
        prompt, completion = output.prompt_token_ids, output.outputs[0]
        assert len(completion.token_ids) == MAX_TOKENS and completion.logprobs is not None
        ids = torch.tensor([prompt + completion.token_ids[:-1]])
        scores = torch.log_softmax(self.model(ids).logits[0, len(prompt) - 1 :], dim=-1)
        assert scores.argmax(-1).tolist() == completion.token_ids, f"prompt of {len(prompt)} tokens"
        ours = torch.tensor([line[token].logprob for line, token in zip(completion.logprobs, completion.token_ids)])
        theirs = scores.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
        difference = (ours - theirs).abs().max().item()
        assert difference <= TOLERANCE, f"prompt of {len(prompt)} tokens: {difference}"


def random_prompts(vocab_size: int, seed: int, shared: int = 0) -> list[list[int]]:
    """32 prompts of 1 to 600 tokens; the first `shared` tokens are common to those that are long enough."""
    rng = random.Random(seed)
    lengths = [
        1,
        2,
        15,
        16,
        17,
        31,
        32,
        33,
        63,
        64,
        65,
        599,
        600,
        *(rng.randint(3, 600) for _ in range(NUM_PROMPTS - 13)),
    ]
    common = [rng.randrange(vocab_size) for _ in range(shared)]
    return [(common + [rng.randrange(vocab_size) for _ in range(n)])[:n] if n > shared else common[:n] for n in lengths]


def run(path: Path, prompts: list[list[int]], **settings: object) -> list[RequestOutput]:
    """All prompts at once, on a fresh engine."""
    defaults = {
        "dtype": "float32",
        "max_model_len": MAX_MODEL_LEN,
        "block_size": 16,
        "max_num_seqs": 32,
        "num_threads": 1,
    }
    with LLM(str(path), **{**defaults, **settings}) as llm:
        return llm.generate([{"prompt_token_ids": p} for p in prompts], GREEDY, use_tqdm=False)


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Reference, int]:
    path = tmp_path_factory.mktemp(request.param)
    make_checkpoint(request.param, path)
    reference = Reference(path)
    return path, reference, reference.model.config.vocab_size


@pytest.mark.parametrize("budget", [64, 2048])
def test_prompts_submitted_together_equal_transformers(family, budget):
    path, reference, vocab_size = family
    for output in run(path, random_prompts(vocab_size, seed=1), max_num_batched_tokens=budget):
        reference.check(output)


def test_prefix_cache_hits_equal_transformers(family):
    path, reference, vocab_size = family
    prompts = random_prompts(vocab_size, seed=2, shared=200)
    with LLM(
        str(path), dtype="float32", max_model_len=MAX_MODEL_LEN, block_size=16, max_num_seqs=32, num_threads=1
    ) as llm:
        inputs = [{"prompt_token_ids": p} for p in prompts]
        first = llm.generate(inputs, GREEDY, use_tqdm=False)
        second = llm.generate(inputs, GREEDY, use_tqdm=False)
    for before, after in zip(first, second):
        assert after.num_cached_tokens == (len(after.prompt_token_ids) - 1) // 16 * 16
        assert after.outputs[0].token_ids == before.outputs[0].token_ids
        reference.check(after)


def test_preempted_requests_equal_transformers(family):
    path, reference, vocab_size = family
    num_blocks = 90 if getattr(reference.model.config, "sliding_window", None) is None else 34
    pool = {"num_gpu_blocks_override": num_blocks, "max_num_batched_tokens": 64, "scheduler_reserve_full_isl": False}
    outputs = run(path, random_prompts(vocab_size, seed=3), **pool)
    assert sum(output.metrics.num_preemptions for output in outputs) >= effort(4, 10)
    for output in outputs:
        reference.check(output)


@pytest.mark.parametrize("budget", [64, 2048])
def test_windows_shorter_than_the_prompt_equal_transformers(tmp_path, budget):
    make_checkpoint("mistral", tmp_path, sliding_window=24)
    reference = Reference(tmp_path)
    outputs = run(tmp_path, random_prompts(reference.model.config.vocab_size, seed=4), max_num_batched_tokens=budget)
    for output in outputs:
        reference.check(output)


def test_prompt_logprobs_equal_transformers(family):
    path, reference, vocab_size = family
    prompts = random_prompts(vocab_size, seed=5)[:16]
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=2)
    settings = {
        "dtype": "float32",
        "max_model_len": MAX_MODEL_LEN,
        "block_size": 16,
        "max_num_seqs": 16,
        "num_threads": 1,
    }
    with LLM(str(path), max_num_batched_tokens=50, **settings) as llm:
        outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    for output in outputs:
        ids = output.prompt_token_ids
        lines = output.prompt_logprobs
        assert lines is not None and len(lines) == len(ids) and lines[0] is None
        with torch.inference_mode():
            scores = torch.log_softmax(reference.model(torch.tensor([ids])).logits[0], dim=-1)
        for position in range(1, len(ids)):
            line = lines[position]
            ours, theirs = line[ids[position]].logprob, scores[position - 1, ids[position]].item()
            assert math.isfinite(ours) and abs(ours - theirs) <= TOLERANCE
            best = scores[position - 1].argmax().item()
            assert line[best].rank == 1
