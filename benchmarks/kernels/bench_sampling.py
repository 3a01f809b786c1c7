"""Choosing tokens from logits: native kernels against torch, and against one parallel read of the logits.

    python benchmarks/kernels/bench_sampling.py --lines 1 64 --vocab-size 151936

Every case first checks that both choose the same tokens. The ceiling is the read of `is_finite` over the same logits
in the same run. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from quire.core.sampling_params import SamplingParams
from quire.kernels.native.elementwise import is_finite
from quire.kernels.native.runtime import NativeRuntime
from quire.sample.ops.interface import SamplingOps
from quire.sample.ops.native import NativeSamplingOps
from quire.sample.ops.torch_ops import TorchSamplingOps
from quire.sample.sampler import Sampler
from quire.sample.states import SamplingStates

CASES = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "top_k": {"top_k": 50},
    "top_p": {"top_p": 0.95},
    "top_k top_p": {"temperature": 0.8, "top_k": 50, "top_p": 0.95},
    "min_p": {"min_p": 0.05},
    "penalties": {"temperature": 0.0, "presence_penalty": 0.5},
    "greedy logprobs": {"temperature": 0.0, "logprobs": 5},
}
MISMATCHES_ALLOWED = 0.02  # random numbers on the edge between two tokens of a large vocabulary


def median_ms(call: Callable[[], object], repeats: int) -> float:
    """Median wall time of `call` in milliseconds, after two warm-up calls."""
    times = []
    for number in range(repeats + 2):
        start = time.perf_counter()
        call()
        if number >= 2:
            times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)


def make_logits(num_lines: int, vocab_size: int, shape: str) -> torch.Tensor:
    """Lines whose probabilities fall as a power of the rank, as a model's do; or normal logits, which are flatter."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(num_lines, vocab_size, generator=generator)
    if shape == "normal":
        return noise * 2.5
    order = torch.randperm(vocab_size, generator=generator)
    return noise * 0.5 - 1.5 * torch.log1p(order.float())


def make_sampler(
    params: SamplingParams, num_lines: int, vocab_size: int, ops: SamplingOps
) -> tuple[SamplingStates, Sampler]:
    """A sampler whose rows all want `params`, after prompts of 200 tokens."""
    states = SamplingStates(num_lines, vocab_size, torch.device("cpu"), apply_penalties=ops.apply_penalties_inplace)
    prompt = np.random.default_rng(0).integers(0, vocab_size, 200).astype(np.int32)
    for row in range(num_lines):
        states.add_row(row, params, prompt, 150, seed=row)
    return states, Sampler(states, ops)


def bench_case(
    name: str, logits: torch.Tensor, runtime: NativeRuntime, repeats: int, ceiling_ms: float
) -> dict[str, float]:
    """Times of one case; prints them."""
    num_lines, vocab_size = logits.shape
    params = SamplingParams(**CASES[name])  # type: ignore[arg-type]
    rows, positions = np.arange(num_lines, dtype=np.int32), np.arange(num_lines) + 200
    times, tokens = {}, []
    for kind, ops in (("native", NativeSamplingOps(runtime)), ("torch", TorchSamplingOps())):
        _, sampler = make_sampler(params, num_lines, vocab_size, ops)
        tokens.append(sampler.sample(logits.clone(), rows, positions).token_ids)
        work = logits.clone()
        few = repeats if kind == "native" else max(2, repeats // 8)
        times[kind] = median_ms(lambda s=sampler, w=work: s.sample(w, rows, positions), few)  # type: ignore[misc]
    mismatches = float((tokens[0] != tokens[1]).mean())
    assert mismatches <= MISMATCHES_ALLOWED, f"{name}: {mismatches:.1%} of the tokens differ"
    print(
        f"{num_lines:4d} lines  {name:16s} native {times['native']:8.3f} ms  torch {times['torch']:8.2f} ms  "
        f"x{times['torch'] / times['native']:6.1f}  one read {100 * ceiling_ms / times['native']:5.1f} %  "
        f"{100 * mismatches:.1f} % other tokens"
    )
    return {"native_ms": times["native"], "torch_ms": times["torch"], "ceiling_share": ceiling_ms / times["native"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--vocab-size", type=int, default=151_936)
    parser.add_argument("--shape", choices=["power", "normal"], default="power")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tier", default="auto")
    parser.add_argument("--repeats", type=int, default=16)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    args = parser.parse_args()
    runtime = NativeRuntime(args.tier, num_threads=args.threads)
    torch.set_num_threads(args.threads)
    print(f"tier {runtime.tier}, {args.threads} threads, {args.vocab_size} tokens, {args.shape} logits")
    results: dict[str, dict[str, float]] = {}
    for num_lines in args.lines:
        logits = make_logits(num_lines, args.vocab_size, args.shape)
        num_bytes = 4 * logits.numel()
        ceiling_ms = median_ms(lambda x=logits: is_finite(runtime, x), 4 * args.repeats)  # type: ignore[misc]
        print(f"{num_lines:4d} lines  one read         {ceiling_ms:8.3f} ms  {num_bytes / ceiling_ms / 1e6:.1f} GB/s")
        for name in args.cases:
            results[f"{num_lines} {name}"] = bench_case(name, logits, runtime, args.repeats, ceiling_ms)
    print(json.dumps({"bench": "sampling", "tier": runtime.tier, "threads": args.threads, "results": results}))


if __name__ == "__main__":
    main()
