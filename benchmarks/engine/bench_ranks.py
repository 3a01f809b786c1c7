"""One process of two threads beside two ranks of one thread each: tokens a second, and the share of collectives.

python benchmarks/engine/bench_ranks.py MODEL [--batch 1,32] [--tokens 48] [--rounds 2] [--quantization int8]

Engines take turns, one at a time. Answers are compared first: they must be the same bits.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

from quire import LLM, SamplingParams

SETTINGS: dict[str, dict[str, Any]] = {
    "one process, 2 threads": {"num_threads": 2},
    "2 ranks, 1 thread": {"num_threads": 1, "tensor_parallel_size": 2},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--batch", default="1,32")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--prompt-len", type=int, default=32)
    parser.add_argument("--quantization", default=None)
    args = parser.parse_args()
    sizes = [int(size) for size in args.batch.split(",")]
    rates: dict[tuple[str, int], list[float]] = {}
    shares: dict[int, list[float]] = {}
    answers: dict[int, Any] = {}
    for _ in range(args.rounds):
        for name, settings in SETTINGS.items():
            common = {
                "quantization": args.quantization, "max_model_len": 512, "enable_prefix_caching": False,
                "speculative_config": "off",
            }  # fmt: skip
            with LLM(args.model, max_num_seqs=max(sizes), **common, **settings) as llm:
                for size in sizes:
                    prompts = [
                        {"prompt_token_ids": [100 + 7 * i + j for j in range(args.prompt_len)]} for i in range(size)
                    ]
                    params = SamplingParams(max_tokens=args.tokens, temperature=0, ignore_eos=True)
                    first = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
                    llm.generate(prompts, first, use_tqdm=False)  # captures steps
                    busy = llm.llm_engine.call_worker("communication_s")  # of rank 0
                    start = time.perf_counter()
                    outputs = llm.generate(prompts, params, use_tqdm=False)
                    elapsed = time.perf_counter() - start
                    busy_after = llm.llm_engine.call_worker("communication_s")
                    rates.setdefault((name, size), []).append(size * args.tokens / elapsed)
                    if "tensor_parallel_size" in settings:
                        shares.setdefault(size, []).append((busy_after - busy) / elapsed)
                    found = [tuple(output.outputs[0].token_ids) for output in outputs]
                    assert answers.setdefault(size, found) == found, "other tokens"
    one, two = SETTINGS
    results = []
    for size in sizes:
        a, b = (statistics.median(rates[name, size]) for name in (one, two))
        share = statistics.median(shares[size])
        results.append({"batch": size, "one": round(a, 2), "two_ranks": round(b, 2), "ratio": round(b / a, 3)})
        results[-1]["share_of_collectives"] = round(share, 4)
        print(f"batch {size}: {one} {a:.2f} tok/s, {two} {b:.2f} tok/s: {b / a:.3f}; in collectives {100 * share:.1f}%")
    print(json.dumps({"model": args.model, "results": results}))


if __name__ == "__main__":
    main()
