"""`make test-speculation`: the same bytes with drafts, of every method, for every kind of request, on every tier.

For each native tier, and weights in bfloat16, int8 and int4: requests of all kinds in turn (`speculated_requests`) are
answered without drafts, then by each method of `METHODS` in each of `CIRCUMSTANCES`; tokens, texts, ends and the bits
of log-probabilities must be equal. `leaf` answers COUNT of them; random weights of the shape of a 0.5B model, for which
every draft is as good as any other, a tenth. The last line is the number of answers that differ.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from quire import LLM
from tests.robustness.oracle import Oracle, drafting
from tests.robustness.speculated_requests import Answer, Asked, generate, make_requests, sequences

ROOT = Path(__file__).parents[2]
ORACLE = "oracle"
# Method -> settings of the engine; of the oracle, which has seen the answers, None. A method joins by a line.
METHODS: dict[str, dict[str, Any] | None] = {ORACLE: None}
SETTINGS: dict[str, Any] = {"max_model_len": 512, "max_num_seqs": 24, "block_size": 16, "max_num_batched_tokens": 512}
# Circumstance -> settings, and how often the requests are answered: the second time from the prefix cache.
CIRCUMSTANCES: dict[str, tuple[dict[str, Any], int]] = {
    "room for all, then prefix hits": ({}, 2),
    "alone": ({"max_num_seqs": 1}, 1),
    "preempted": ({"num_gpu_blocks_override": 60, "preemption_mode": "recompute"}, 1),
    "swapped": ({"num_gpu_blocks_override": 60, "preemption_mode": "swap", "swap_space": 0.05}, 1),
    "prompts in chunks of 24": ({"max_num_batched_tokens": 24, "max_num_seqs": 7}, 1),
}
PLAIN = next(iter(CIRCUMSTANCES))


def differences(
    model: dict[str, Any], count: int, methods: Sequence[str], circumstances: Sequence[str], seed: int = 0
) -> tuple[int, Counter[str]]:
    """(answers compared, those that differ by method, circumstance and kind)."""
    with LLM(**model, **SETTINGS) as llm:
        requests = make_requests(llm.llm_engine, count, seed)
        expected = generate(llm, requests)
        vocab_size = llm.llm_engine.tokenizer.vocab_size
    num_compared, found = 0, Counter[str]()
    for method in methods:
        for circumstance in circumstances:
            settings, num_times = CIRCUMSTANCES[circumstance]
            oracle = Oracle(sequences(requests, expected), vocab_size, seed=seed)
            more = METHODS[method]
            with ExitStack() as stack:
                if more is None:
                    stack.enter_context(drafting(oracle))
                llm = stack.enter_context(LLM(**{**model, **SETTINGS, **settings, **(more or {})}))
                for _ in range(num_times):
                    answers = generate(llm, requests)
                    num_compared += len(answers)
                    found.update(
                        f"{method}, {circumstance}, {one.kind}" for one in differing(requests, expected, answers)
                    )
            assert method != ORACLE or oracle.num_drafted > count, "drafts were verified"
    return num_compared, found


def differing(requests: Sequence[Asked], expected: Sequence[Answer], answers: Sequence[Answer]) -> list[Asked]:
    """The requests whose answers are not what was expected."""
    return [one for one, want, got in zip(requests, expected, answers, strict=True) if want != got]


def models(directory: Path) -> dict[str, tuple[dict[str, Any], float]]:
    """Name -> settings that choose the model, and its share of the count."""
    write_random_model(directory)
    return {"leaf": ({"model": "leaf"}, 1.0), "0.5B": ({"model": str(directory), "load_format": "dummy"}, 0.1)}


def write_random_model(directory: Path) -> None:
    """config.json and tokenizer of the 0.5B shape; the weights are made by `load_format`."""
    importlib.import_module("benchmarks.engine.bench_structured").write_model(directory)


def run_tier(tier: str, directory: Path, count: int, seed: int) -> tuple[int, Counter[str]]:
    """All models and formats on one tier, in a process of its own."""
    command = [sys.executable, "-m", "tests.robustness.speculation", "--directory", str(directory)]
    command += ["--count", str(count), "--seed", str(seed)]
    environment = {**os.environ, "QUIRE_KERNEL_TIER": tier}
    result = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    if result.returncode:
        print(result.stdout)
        return 0, Counter({"the process failed": 1})
    num_compared, found = json.loads(result.stdout.splitlines()[-1])
    return num_compared, Counter(found)


def run_here(directory: Path, count: int, seed: int) -> tuple[int, Counter[str]]:
    """All models and formats on the tier of this process."""
    num_compared, found = 0, Counter[str]()
    for name, (model, share) in models(directory).items():
        for quantization in (None, "int8", "int4"):
            settings = {**model, "quantization": quantization}
            num, here = differences(settings, max(1, round(share * count)), list(METHODS), list(CIRCUMSTANCES), seed)
            num_compared += num
            found.update({f"{name}, {quantization}: {what}": times for what, times in here.items()})
    return num_compared, found


def main() -> int:
    """Exit code 0 when no answer differs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tiers", nargs="*", help="default: all of this machine, and the emulated one")
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)  # of a process for one tier
    args = parser.parse_args()
    if args.directory:
        num_compared, found = run_here(args.directory, args.count, args.seed)
        print(json.dumps([num_compared, found]))
        return 0
    from quire.kernels.native.library import EMULATED_TIER, supported_tiers

    total = 0
    with tempfile.TemporaryDirectory() as directory:
        for tier in args.tiers or [*supported_tiers(), EMULATED_TIER]:
            num_compared, found = run_tier(tier, Path(directory), args.count, args.seed)
            print(f"tier {tier}: {num_compared} answers, {found.total()} differ", flush=True)
            for what, times in sorted(found.items()):
                print(f"  {what}: {times}", flush=True)
            total += found.total()
    print(f"speculation: {total} answers differ")
    return int(total > 0)


if __name__ == "__main__":
    sys.exit(main())
