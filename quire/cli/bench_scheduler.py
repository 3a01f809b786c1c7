"""`quire bench scheduler`: what one step of the control plane costs, with no model behind it.

Called by the command line and by tests. Owns nothing. Prefix caching is on and prompts are distinct, so every
page is hashed and published; sampled tokens are made up.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from quire.config.cache import CacheConfig
from quire.config.scheduler import SchedulerConfig
from quire.core.engine_messages import EngineCoreRequest
from quire.core.kv_spec import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from quire.core.runner_output import ModelRunnerOutput
from quire.core.sampling_params import SamplingParams
from quire.core.scheduler_output import SchedulerOutput
from quire.scheduler.scheduler import Scheduler
from quire.utils.checks import check_int

BLOCK_SIZE = 16
TOKEN_BUDGET = 16384
PROMPT_TOKEN_STRIDE = 7919
VOCAB_SIZE = 30000
MAX_COUNT = 65536
NUM_TENANTS = 10
POLICIES = ("fcfs", "priority", "fair", "shortest")


def measure(
    num_reqs_list: Sequence[int], prompt_len: int = 512, steps: int = 256, policy: str = "fcfs"
) -> dict[str, Any]:
    """Measure each number of concurrent requests.

    Args:
        num_reqs_list: requests that decode together.
        prompt_len: tokens of each prompt.
        steps: decode steps to time.
        policy: scheduling policy; requests are of NUM_TENANTS tenants in turn.

    Returns:
        Machine and sizes, `results`: one record per number of requests, times in microseconds, and
        `scaling`: median decode step of the largest over that of the smallest.
    """
    results = [_measure_one(num_reqs, prompt_len, steps, policy) for num_reqs in num_reqs_list]
    by_size = sorted(results, key=lambda result: result["num_reqs"])
    return {
        "benchmark": "scheduler",
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "policy": policy,
        "prompt_len": prompt_len,
        "steps": steps,
        "block_size": BLOCK_SIZE,
        "max_num_batched_tokens": TOKEN_BUDGET,
        "prefix_caching": True,
        "results": results,
        "scaling": by_size[-1]["decode_step_us"] / by_size[0]["decode_step_us"],
    }


def _measure_one(num_reqs: int, prompt_len: int, steps: int, policy: str) -> dict[str, float]:
    max_tokens = steps + num_reqs * prompt_len // TOKEN_BUDGET + 8  # the first decode while the last are prefilled
    scheduler = _make_scheduler(num_reqs, prompt_len + max_tokens, policy)
    requests = [_make_request(handle, prompt_len, max_tokens) for handle in range(num_reqs)]
    start = time.perf_counter()
    for request in requests:
        scheduler.add_request(request)
    add_s = time.perf_counter() - start
    prefill_s = 0.0
    decode_s: list[float] = []
    while len(decode_s) < steps:
        step_s, scheduled = _step(scheduler)
        if scheduled.total_num_scheduled_tokens == len(scheduled.rows) == num_reqs:
            decode_s.append(step_s)
        else:
            prefill_s += step_s
    return {
        "num_reqs": num_reqs,
        "add_us": 1e6 * add_s / num_reqs,
        "prefill_us": 1e6 * prefill_s / num_reqs,
        "decode_step_us": 1e6 * statistics.median(decode_s),
        "decode_step_p99_us": 1e6 * float(np.percentile(decode_s, 99)),
        "decode_step_per_request_us": 1e6 * statistics.median(decode_s) / num_reqs,
    }


def _step(scheduler: Scheduler) -> tuple[float, SchedulerOutput]:
    """Seconds that one schedule and update take, and what was scheduled."""
    start = time.perf_counter()
    step = scheduler.schedule()
    schedule_s = time.perf_counter() - start
    assert step is not None, "requests are left"
    scheduled = step.output
    rows = scheduled.rows[scheduled.is_sampling]
    output = ModelRunnerOutput(rows=rows, sampled_token_ids=np.full(len(rows), 7, dtype=np.int32))
    start = time.perf_counter()
    scheduler.update_from_output(step, output)
    return schedule_s + time.perf_counter() - start, scheduled


def _make_scheduler(num_reqs: int, max_model_len: int, policy: str) -> Scheduler:
    spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=1, dtype_bytes=4)
    num_blocks = num_reqs * (-(-max_model_len // BLOCK_SIZE)) + 1
    return Scheduler(
        SchedulerConfig(max_num_batched_tokens=TOKEN_BUDGET, max_num_seqs=num_reqs, scheduling_policy=policy),
        CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=True),
        KVCacheConfig(num_blocks=num_blocks, groups=(KVCacheGroupSpec(layer_names=("layer",), spec=spec),)),
        max_model_len,
    )


def _make_request(handle: int, prompt_len: int, max_tokens: int) -> EngineCoreRequest:
    prompt = (handle * PROMPT_TOKEN_STRIDE + np.arange(prompt_len)) % VOCAB_SIZE
    return EngineCoreRequest(
        handle=handle,
        request_id=f"bench-{handle}",
        prompt_token_ids=prompt.astype(np.int32),
        sampling_params=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
        seed=handle,
        eos_token_id=2,
        tenant=f"tenant {handle % NUM_TENANTS}",
        priority=handle % NUM_TENANTS,
    )


def print_table(report: dict[str, Any]) -> None:
    """The report for people."""
    print(
        f"{report['machine']}; policy {report['policy']}, prompts of {report['prompt_len']} tokens, prefix caching on"
    )
    print("microseconds")
    print(f"{'requests':>8} {'add+hash':>9} {'prefill':>9} {'decode step':>12} {'p99':>9} {'per request':>12}")
    for result in report["results"]:
        print(
            f"{result['num_reqs']:>8} {result['add_us']:>9.1f} {result['prefill_us']:>9.1f} "
            f"{result['decode_step_us']:>12.1f} {result['decode_step_p99_us']:>9.1f} "
            f"{result['decode_step_per_request_us']:>12.3f}"
        )
    print(f"largest over smallest: {report['scaling']:.2f}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's flags."""
    parser.add_argument("--num-reqs", type=int, nargs="+", default=[64, 256, 1024], help="requests that run together")
    parser.add_argument("--prompt-len", type=int, default=512, help="tokens of each prompt")
    parser.add_argument("--policy", choices=POLICIES, default="fcfs", help="scheduling policy")
    parser.add_argument("--steps", type=int, default=256, help="decode steps to time")


def run(args: argparse.Namespace) -> int:
    """Measure and print; the last line is one JSON object."""
    for name, values in (("num_reqs", args.num_reqs), ("prompt_len", [args.prompt_len]), ("steps", [args.steps])):
        for value in values:
            check_int(name, value, 1, MAX_COUNT)
    report = measure(args.num_reqs, args.prompt_len, args.steps, args.policy)
    print_table(report)
    print(json.dumps(report))
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """The same as `quire bench scheduler`, as a module of its own."""
    parser = argparse.ArgumentParser(prog="quire bench scheduler")
    add_arguments(parser)
    return run(parser.parse_args(argv))


if __name__ == "__main__":
    raise SystemExit(main())
