"""A checkpoint through the whole engine on the CPU: start, streams, batches, prefill, and prefill beside decoding.

    python benchmarks/checkpoints.py qwen-0.5b
    python -m benchmarks.engine.bench_cpu --model build/checkpoints/qwen-0.5b

The cases of `benchmarks/workload.py`, which other engines run through `benchmarks/peers`, and two more: `start`, from
the start of a fresh process to its first token, and `interleave`, what a long prompt does to the steps of requests
that are decoding; it runs with the `max_decode_slowdown` of a server, where offline generation has no such limit.
Greedy, token ids in and out, no prefix caching. One stream is also given as a share of what the machine could do if it
did nothing but read the weights once per token, at the speed of reading that the same run measures. Runs alone on a
machine; the last line is one JSON object.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import workload
from benchmarks.engine.read_limit import read_bandwidth, weight_bytes
from quire import LLM, SamplingParams
from quire.config.resolve import SERVER_DECODE_SLOWDOWN
from quire.core.sampling_params import RequestOutputKind

OWN_CASES = ("start", "interleave")
NUM_DECODERS = 16
NUM_QUIET_STEPS = 32
LONG_PROMPT = 4000
FIRST_TOKEN_MARK = "FIRST TOKEN"
REQUEST_IDS = itertools.count()


@dataclass(frozen=True, slots=True)
class Step:
    """One step of the engine."""

    seconds: float
    num_tokens: int


def greedy(output_len: int) -> SamplingParams:
    """Exactly `output_len` tokens, no text."""
    return SamplingParams(
        temperature=0,
        max_tokens=output_len,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def submit(llm: LLM, prompts: workload.Prompts, output_len: int) -> list[str]:
    """Queue prompts; returns their request ids."""
    ids = [f"bench-{next(REQUEST_IDS)}" for _ in prompts]
    for request_id, prompt in zip(ids, prompts, strict=True):
        llm.llm_engine.add_request(request_id, {"prompt_token_ids": prompt}, greedy(output_len))
    return ids


def step(llm: LLM) -> tuple[Step, list[str]]:
    """Run one step; returns it, and the requests that it finished."""
    start = time.perf_counter()
    outputs = llm.llm_engine.step()
    seconds = time.perf_counter() - start
    return Step(seconds, llm.llm_engine.last_stats.num_scheduled_tokens), [output.request_id for output in outputs]


def run_case(llm: LLM, case: workload.Case, rng: random.Random) -> dict[str, float]:
    """Time one common case; decoding alone is the steps in which every request makes a token and reads no prompt."""
    rounds = []
    for _ in range(case.rounds):
        start = time.perf_counter()
        submit(llm, workload.random_prompts(rng, case.num_reqs, case.prompt_len), case.output_len)
        steps = []
        while llm.llm_engine.has_unfinished_requests():
            steps.append(step(llm)[0])
        rounds.append((time.perf_counter() - start, [s.seconds for s in steps if s.num_tokens == case.num_reqs]))
    seconds, decode_steps = sorted(rounds)[len(rounds) // 2]
    figures = workload.figures_of(case, seconds)
    if decode_steps:
        figures["decode_tokens_per_s"] = case.num_reqs * len(decode_steps) / sum(decode_steps)
        figures["median_decode_step_s"] = statistics.median(decode_steps)
    return figures


def run_interleave(llm: LLM, rng: random.Random) -> dict[str, float]:
    """Steps of requests that decode, quiet and while a long prompt is computed beside them."""
    decoders = submit(llm, workload.random_prompts(rng, NUM_DECODERS, 64), 1024)  # more steps than all of this takes
    while step(llm)[0].num_tokens != NUM_DECODERS:
        pass
    quiet = [step(llm)[0].seconds for _ in range(NUM_QUIET_STEPS)]
    start = time.perf_counter()
    [newcomer] = submit(llm, workload.random_prompts(rng, 1, LONG_PROMPT), 1)
    during, finished = [], []
    while newcomer not in finished:
        one, finished = step(llm)
        during.append(one.seconds)
    long_first_s = time.perf_counter() - start
    llm.llm_engine.discard_requests(decoders)
    while llm.llm_engine.has_unfinished_requests():
        step(llm)
    stalled_s = statistics.median(quiet)
    figures = {
        "quiet_step_s": stalled_s,
        "step_beside_s": statistics.median(during),
        "longest_step_beside_s": max(during),
        "num_steps_beside": len(during),
        "long_first_token_s": long_first_s,
        "ratio": statistics.median(during) / stalled_s,
        "load": workload.load_average(),
    }
    what = f"interleave: {NUM_DECODERS} decode while a prompt of {LONG_PROMPT} is computed"
    print(f"CASE {what}: " + ", ".join(f"{name} {value:.4g}" for name, value in figures.items()), flush=True)
    return figures


def run_start(arguments: list[str]) -> dict[str, dict[str, float]]:
    """Seconds from the start of a process to its first token: with an empty cache directory, then with what that left.

    The checkpoint's file is in the system's page cache both times, unless memory does not hold it.
    """
    results = {}
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR", "/var/tmp")) as cache:
        environment = {**os.environ, "QUIRE_CACHE_DIR": cache}
        for name in ("cold", "warm"):
            begun = time.perf_counter()
            command = [sys.executable, "-m", "benchmarks.engine.bench_cpu", "--first-token", *arguments]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith(FIRST_TOKEN_MARK):
                    seconds = time.perf_counter() - begun
                    peak = json.loads(line.removeprefix(FIRST_TOKEN_MARK))["peak_rss_gib"]
                    results[name] = {"start_s": seconds, "peak_rss_gib": peak, "load": workload.load_average()}
            if process.wait() or name not in results:
                raise SystemExit(f"the started process ended with {process.returncode} before its first token")
            figures = ", ".join(f"{key} {value:.4g}" for key, value in results[name].items())
            print(f"CASE start, {name} cache: {figures}", flush=True)
    return results


def peak_rss_gib() -> float:
    """The most memory this process has held, in GiB, mapped files included."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def make_llm(args: argparse.Namespace, **defaults: Any) -> LLM:
    """The engine; settings that were not given have these defaults, or their own."""
    kv_cache_bytes = int(args.kv_cache_gib * 2**30)
    settings = {"speculative_config": "off", **defaults, **settings_of(args)}  # peers have none, either
    return LLM(str(args.model), enable_prefix_caching=False, kv_cache_memory_bytes=kv_cache_bytes, **settings)


def settings_of(args: argparse.Namespace) -> dict[str, Any]:
    """The engine's settings among the arguments, those that were given."""
    names = (
        "quantization",
        "attention_backend",
        "kernel_tier",
        "num_threads",
        "max_num_batched_tokens",
        "max_decode_slowdown",
    )
    return {name: getattr(args, name) for name in names if getattr(args, name) is not None}


def usable_cores() -> int:
    """Cores that this process may run on, as far as the system says."""
    return len(os.sched_getaffinity(0))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="directory of a checkpoint, or GGUF file")
    parser.add_argument("--quantization")
    parser.add_argument("--attention-backend")
    parser.add_argument("--kernel-tier")
    parser.add_argument("--num-threads", type=int)
    parser.add_argument("--max-num-batched-tokens", type=int)
    parser.add_argument("--max-decode-slowdown", type=float)
    parser.add_argument("--kv-cache-gib", type=float, default=2.0)
    names = ",".join((*workload.CASES, *OWN_CASES))
    parser.add_argument("--cases", default=names, help=f"separated by commas; default: {names}")
    parser.add_argument("--json", type=Path, help="also write the last line to this file")
    parser.add_argument("--first-token", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def show_first_token(args: argparse.Namespace) -> int:
    """What the `start` case runs: make one token, and say so."""
    llm = make_llm(args)
    submit(llm, [[5, 6, 7, 8]], 1)
    while llm.llm_engine.has_unfinished_requests():
        llm.llm_engine.step()
    print(FIRST_TOKEN_MARK, json.dumps({"peak_rss_gib": peak_rss_gib()}), flush=True)
    return 0


def main() -> int:
    args = parse_args()
    if args.first_token:
        return show_first_token(args)
    wanted = args.cases.split(",")
    common = [name for name in wanted if name not in OWN_CASES]
    cases = workload.pick_cases(",".join(common)) if common else []
    results: dict[str, Any] = {}
    if "start" in wanted:
        results["start"] = run_start(sys.argv[1:])
    num_threads = args.num_threads or usable_cores()
    bandwidth, _ = read_bandwidth(num_threads)
    llm = make_llm(args)
    rng = random.Random(0)
    run_case(llm, workload.WARM_UP, rng)
    for case in cases:
        results[case.name] = run_case(llm, case, rng)
        workload.print_case(case, results[case.name])
    peak_gib = peak_rss_gib()
    llm.shutdown()
    if "interleave" in wanted:
        llm = make_llm(args, max_decode_slowdown=SERVER_DECODE_SLOWDOWN)
        run_case(llm, workload.WARM_UP, rng)
        results["interleave"] = run_interleave(llm, rng)
        llm.shutdown()
    bandwidth_after, how = read_bandwidth(num_threads)
    bandwidth = (bandwidth + bandwidth_after) / 2
    limit = bandwidth / weight_bytes(args.model, args.quantization)
    share = results["stream"]["decode_tokens_per_s"] / limit if "stream" in results else None
    print(f"peak memory {peak_gib:.2f} GiB; reads at {bandwidth / 1e9:.1f} GB/s ({how}, before and after)")
    print(f"one stream: at most {limit:.1f} tokens/s" + (f", {share:.0%} of it reached" if share else ""))
    summary = {
        "model": args.model.name,
        "settings": settings_of(args),
        "num_threads": num_threads,
        "cases": results,
        "peak_rss_gib": peak_gib,
        "read_bytes_per_s": bandwidth,
        "stream_limit_tokens_per_s": limit,
        "stream_share_of_limit": share,
    }
    workload.print_json(summary)
    if args.json is not None:
        args.json.write_text(json.dumps(summary, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
