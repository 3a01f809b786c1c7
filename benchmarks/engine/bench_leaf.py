"""What prefix caching and continuous batching give on the embedded model.

Two ratios, each taken in one sitting: time to first token of a request whose 1500-token beginning is in the
prefix cache over that of the request that put it there, and tokens per second of 64 concurrent requests over
one. Run by `make bench-engine`, alone on the machine. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time

from quire import LLM, SamplingParams

PREFIX_LEN = 1500
PROMPT_LEN = 32


def random_prompt(rng: random.Random, length: int, vocab_size: int) -> dict[str, list[int]]:
    """A prompt of ordinary token ids that shares nothing with any other."""
    return {"prompt_token_ids": [rng.randrange(300, vocab_size) for _ in range(length)]}


def first_token_seconds(llm: LLM, prompt: dict[str, list[int]]) -> tuple[float, int]:
    """Seconds from submission to the first token, and how many prompt tokens were cached."""
    start = time.perf_counter()
    [output] = llm.generate(prompt, SamplingParams(max_tokens=1, temperature=0), use_tqdm=False)
    return time.perf_counter() - start, output.num_cached_tokens or 0


def bench_prefix(llm: LLM, rng: random.Random, vocab_size: int, rounds: int) -> dict[str, float]:
    """Median times to first token, cold and with the shared prefix cached."""
    cold, warm = [], []
    for _ in range(rounds):
        shared = random_prompt(rng, PREFIX_LEN, vocab_size)["prompt_token_ids"]
        for times, expect_hit in ((cold, False), (warm, True)):
            tail = random_prompt(rng, 20, vocab_size)["prompt_token_ids"]
            seconds, cached = first_token_seconds(llm, {"prompt_token_ids": shared + tail})
            assert (cached > PREFIX_LEN - 64) == expect_hit, f"cached {cached} tokens"
            times.append(seconds)
    ratio = statistics.median(warm) / statistics.median(cold)
    return {"ttft_cold_s": statistics.median(cold), "ttft_cached_s": statistics.median(warm), "ttft_ratio": ratio}


def tokens_per_second(llm: LLM, rng: random.Random, vocab_size: int, num_reqs: int, output_len: int) -> float:
    """Output tokens per second, prefill included."""
    prompts = [random_prompt(rng, PROMPT_LEN, vocab_size) for _ in range(num_reqs)]
    params = SamplingParams(max_tokens=output_len, ignore_eos=True, temperature=0)
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    assert all(len(output.outputs[0].token_ids) == output_len for output in outputs)
    return num_reqs * output_len / seconds


def main() -> int:
    """Run both and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--attention-backend", default="auto", help="as the setting of that name")
    args = parser.parse_args()
    llm = LLM("leaf", attention_backend=args.attention_backend, speculative_config="off")
    vocab_size = len(llm.get_tokenizer())
    rng = random.Random(0)
    tokens_per_second(llm, rng, vocab_size, 4, 8)
    figures = bench_prefix(llm, rng, vocab_size, args.rounds)
    single, many = [], []
    for _ in range(args.rounds):
        single.append(tokens_per_second(llm, rng, vocab_size, 1, args.output_len))
        many.append(tokens_per_second(llm, rng, vocab_size, 64, args.output_len))
    figures["tokens_per_s_1"] = statistics.median(single)
    figures["tokens_per_s_64"] = statistics.median(many)
    figures["throughput_ratio"] = figures["tokens_per_s_64"] / figures["tokens_per_s_1"]
    for name, value in figures.items():
        print(f"{name:>18} {value:10.4f}")
    print(json.dumps({name: round(value, 5) for name, value in figures.items()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
