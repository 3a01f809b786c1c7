"""What preemption costs by recompute, by swap, and by what `auto` chooses, over context lengths.

A request with a long context runs in the only row; an urgent one of a single token takes it. Timed is what passes
until the long one's next token: two steps, and what preemption adds to them. The three modes take turns, so that a slow
moment hits all of them. "uncached" is without prefix caching: everything is computed again. "cached" is with it, and
pages to spare: only what follows the last full page is computed again, so there the two modes cross. llama-wide-cache
has a small model's weights and a large one's keys and values. Run alone on the machine:

    python benchmarks/engine/bench_preemption.py --model leaf --contexts 16 64 256 1024 1800
    python benchmarks/checkpoints.py llama-wide-cache --out build/checkpoints
    python benchmarks/engine/bench_preemption.py --model build/checkpoints/llama-wide-cache --contexts 32 256 1024 4096

The last line is one JSON object; `worst_ratio` is the largest of auto's seconds over those of the better mode.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from dataclasses import dataclass, field

from quire import LLM, SamplingParams

MODES = ("recompute", "swap", "auto")
KINDS = {"uncached": False, "cached": True}


@dataclass
class Runner:
    """An engine in one mode with one long request in it."""

    llm: LLM
    seconds: list[float] = field(default_factory=list)
    num_preemptions: int = 0
    num_swaps: int = 0
    num_urgent: int = 0

    def begin(self, context: list[int], max_tokens: int) -> None:
        """Compute the context and a first token."""
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0, detokenize=False)
        self.llm.llm_engine.add_request("long", {"prompt_token_ids": context}, params, priority=1)
        self._step_until_token()

    def preempt(self) -> float:
        """Seconds from an urgent arrival to the long request's next token."""
        engine, self.num_urgent = self.llm.llm_engine, self.num_urgent + 1
        params = SamplingParams(max_tokens=1, ignore_eos=True, temperature=0, detokenize=False)
        start = time.perf_counter()
        engine.add_request(f"urgent {self.num_urgent}", {"prompt_token_ids": [5]}, params, priority=-1)
        self._step_until_token()
        return time.perf_counter() - start

    def _step_until_token(self) -> None:
        engine = self.llm.llm_engine
        while True:
            outputs = engine.step()
            self.num_preemptions += engine.last_stats.num_preemptions
            self.num_swaps += engine.last_stats.num_swap_preemptions
            if any(output.request_id == "long" for output in outputs):
                return


def measure(args: argparse.Namespace, kind: str, num_tokens: int) -> dict[str, object]:
    """One context length: median seconds of each mode, and what auto chose."""
    rng = random.Random(num_tokens)
    context = [rng.randrange(300, args.vocab_size) for _ in range(num_tokens)]
    rounds = args.warmup + args.rounds
    runners = {}
    for mode in MODES:
        llm = LLM(
            args.model, max_num_seqs=1, scheduling_policy="priority", preemption_mode=mode,
            swap_space=0 if mode == "recompute" else args.swap_space, enable_prefix_caching=KINDS[kind],
            max_model_len=num_tokens + rounds + 64, kv_cache_memory_bytes=args.kv_cache_bytes, dtype=args.dtype,
            disable_log_stats=True, speculative_config="off",
        )  # fmt: skip
        runners[mode] = Runner(llm)
        runners[mode].begin(context, rounds + 32)
    for number in range(rounds):
        for mode in rng.sample(MODES, len(MODES)):
            seconds = runners[mode].preempt()
            if number >= args.warmup:
                runners[mode].seconds.append(seconds)
            elif number == args.warmup - 1:
                runners[mode].num_preemptions = runners[mode].num_swaps = 0
    for runner in runners.values():
        assert runner.num_preemptions >= args.rounds, "every urgent arrival preempts"
        runner.llm.shutdown()
    median = {mode: statistics.median(runner.seconds) for mode, runner in runners.items()}
    share = runners["auto"].num_swaps / max(1, runners["auto"].num_preemptions)
    return {
        "kind": kind, "context": num_tokens, **{f"{mode}_s": round(median[mode], 6) for mode in MODES},
        "auto_swaps": round(share, 2), "ratio": round(median["auto"] / min(median["recompute"], median["swap"]), 3),
    }  # fmt: skip


def main() -> int:
    """Measure every kind and length, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="leaf")
    parser.add_argument("--contexts", type=int, nargs="+", default=[16, 64, 256, 1024, 1900])
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--warmup", type=int, default=8, help="rounds that are not counted; auto measures in them")
    parser.add_argument("--swap-space", type=float, default=0.5, help="GiB")
    parser.add_argument("--kv-cache-bytes", type=int, default=1 << 30)
    parser.add_argument("--vocab-size", type=int, default=3000)
    parser.add_argument("--dtype", default="auto")
    args = parser.parse_args()
    print("kind      context  recompute       swap       auto  auto swaps  auto / better")
    rows = []
    for kind in args.kinds:
        for num_tokens in args.contexts:
            row = measure(args, kind, num_tokens)
            rows.append(row)
            times = "".join(f"{1000 * float(str(row[f'{mode}_s'])):8.3f} ms" for mode in MODES)
            share = float(str(row["auto_swaps"]))
            print(f"{kind:9} {num_tokens:7}{times}{share:11.0%}{row['ratio']:15}", flush=True)
    worst = max(float(str(row["ratio"])) for row in rows)
    print(json.dumps({"model": args.model, "rows": rows, "worst_ratio": worst}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
