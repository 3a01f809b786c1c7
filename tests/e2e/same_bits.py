"""The same requests under every circumstance, compared to the bit: tokens and log-probabilities.

`python -m tests.e2e.same_bits --model leaf --count 200` runs all circumstances and prints one figure last: requests
that differ. The tests run a few requests through the same code.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Sequence
from typing import Any

from quire import LLM, RequestOutput, SamplingParams
from quire.kernels.native.library import supported_tiers

Answer = tuple[tuple[int, ...], tuple[float, ...]]

# Circumstance -> settings of the engine. The first is what the others are compared with.
CIRCUMSTANCES: dict[str, dict[str, Any]] = {
    "alone": {"max_num_seqs": 1, "num_threads": 1, "enforce_eager": True},
    "alone, replayed": {"max_num_seqs": 1, "num_threads": 1},
    "batches of 2": {"max_num_seqs": 2, "num_threads": 2},
    "batches of 17": {"max_num_seqs": 17, "num_threads": 2},
    "batches of 64": {"max_num_seqs": 64, "num_threads": 2},
    "one thread": {"max_num_seqs": 64, "num_threads": 1},
    "chunks of 7": {"max_num_seqs": 7, "max_num_batched_tokens": 7},
    "chunks of 64": {"max_num_seqs": 17, "max_num_batched_tokens": 64},
    "chunks of 2048": {"max_num_seqs": 64, "max_num_batched_tokens": 2048},
    "prompts cut by their cost": {"max_num_seqs": 17, "max_num_batched_tokens": 320, "max_decode_slowdown": 2.0},
    "cached": {"max_num_seqs": 17, "enable_prefix_caching": True, "num_gpu_blocks_override": 4000},
    "preempted": {"max_num_seqs": 17, "num_gpu_blocks_override": 60},
}


def make_requests(
    count: int, vocab_size: int, max_tokens: int, longest: int = 300
) -> tuple[list[dict[str, list[int]]], list[Any]]:
    """Prompts of 1 to `longest` tokens, every second one greedy and the others seeded."""
    rng = random.Random(11)
    prompts = [
        {"prompt_token_ids": [rng.randrange(vocab_size) for _ in range(rng.randint(1, longest))]} for _ in range(count)
    ]
    seeded = {"temperature": 0.9, "top_p": 0.95, "top_k": 40}
    params = [
        SamplingParams(
            max_tokens=max_tokens, ignore_eos=True, logprobs=1, seed=i, **({"temperature": 0} if i % 2 else seeded)
        )
        for i in range(count)
    ]
    return prompts, params


def answers(outputs: Sequence[RequestOutput]) -> list[Answer]:
    """Tokens and their log-probabilities."""
    found = []
    for output in outputs:
        completion = output.outputs[0]
        assert completion.logprobs is not None
        lines = zip(completion.logprobs, completion.token_ids, strict=True)
        found.append((tuple(completion.token_ids), tuple(line[token].logprob for line, token in lines)))
    return found


def run(
    model: str, prompts: list[Any], params: list[Any], *, warm: bool = False, **settings: Any
) -> tuple[list[Answer], int]:
    """(answers, preemptions); `warm` runs the prompts once before, so that their pages are cached."""
    settings = {"enable_prefix_caching": False, "max_model_len": 512, "attention_backend": "native_cpu", **settings}
    with LLM(model, **settings) as llm:
        if warm:
            llm.generate(prompts, SamplingParams(max_tokens=1, temperature=0), use_tqdm=False)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        if warm:
            assert any(output.num_cached_tokens for output in outputs), "nothing was cached"
        return answers(outputs), sum(output.metrics.num_preemptions for output in outputs if output.metrics)


def main() -> None:
    """Run every circumstance on every tier."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="leaf")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--vocab-size", type=int, default=3000)
    parser.add_argument("--quantization", default=None)
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--tiers", default=",".join(supported_tiers()))
    args = parser.parse_args()
    prompts, params = make_requests(args.count, args.vocab_size, args.max_tokens)
    common = {"quantization": args.quantization, "kv_cache_dtype": args.kv_cache_dtype}
    num_different, expected = 0, None
    cases = list(CIRCUMSTANCES.items())
    cases += [(f"tier {tier}", {"max_num_seqs": 64, "kernel_tier": tier}) for tier in args.tiers.split(",")]
    for name, settings in cases:
        start = time.perf_counter()
        found, num_preemptions = run(args.model, prompts, params, warm=name == "cached", **common, **settings)
        expected = expected or found
        different = sum(one != other for one, other in zip(found, expected, strict=True))
        num_different += different
        print(f"{name}: {different} of {args.count} differ, {num_preemptions} preemptions, "
              f"{time.perf_counter() - start:.1f} s", flush=True)  # fmt: skip
    print(f"{num_different} differences")
    sys.exit(num_different > 0)


if __name__ == "__main__":
    main()
