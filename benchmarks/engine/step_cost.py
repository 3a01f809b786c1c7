"""What a step costs beside the model, in two trees in turn: schedule and update, and the whole step of `leaf`.

Called by `bench_speculation --step-cost`, which runs this file as a program of each tree: `python step_cost.py` prints
one JSON object. CPU time of the thread that steps, one thread in all; the least of a round counts, as everything that
disturbs makes a step longer.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

BATCH_SIZES = (1, 64)
NUM_WARM_STEPS, NUM_STEPS = 20, 200
PARTS = ("schedule and update", "step")


def compare_trees(other: Path, rounds: int) -> int:
    """Print this tree's costs over those of the other one; medians of pairs in turn."""
    trees = {"this": Path(__file__).parent.parent.parent, "other": other.resolve()}
    ratios: dict[tuple[str, str], list[float]] = {}
    for number in range(rounds):
        found = {name: measure_tree(trees[name]) for name in (("this", "other") if number % 2 else ("other", "this"))}
        for size in map(str, BATCH_SIZES):
            for part in PARTS:
                ratios.setdefault((size, part), []).append(found["this"][size][part] / found["other"][size][part])
                print(f"{size:>3} {part:20} {found['other'][size][part]:8.1f} {found['this'][size][part]:8.1f} us")
    medians = {f"{part} of {size}": statistics.median(values) for (size, part), values in ratios.items()}
    for name, ratio in medians.items():
        print(f"{name:30} {ratio - 1:+.2%}")
    print(json.dumps({"step_cost_ratio": medians}))
    return 0


def measure_tree(tree: Path) -> dict[str, dict[str, float]]:
    """Microseconds by batch size and part, as one process of the tree measures them."""
    own = tree / ".venv" / "bin" / "python"
    python = str(own) if own.exists() else sys.executable
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([python, __file__], cwd=tree, env=environment, check=True, capture_output=True, text=True)
    found: dict[str, dict[str, float]] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure() -> dict[str, dict[str, float]]:
    """Microseconds by batch size and part, in this process."""
    from quire import LLM, SamplingParams
    from quire.scheduler.scheduler import Scheduler

    spent = {"schedule and update": 0.0}

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                spent["schedule and update"] += time.thread_time() - start

        return call

    Scheduler.schedule = timed(Scheduler.schedule)  # type: ignore[method-assign]
    Scheduler.update_from_output = timed(Scheduler.update_from_output)  # type: ignore[method-assign]
    settings: dict[str, Any] = {"num_threads": 1, "max_num_seqs": max(BATCH_SIZES), "enable_prefix_caching": False}
    try:
        llm = LLM("leaf", speculative_config="off", **settings)
    except Exception:  # a tree that has no such setting
        llm = LLM("leaf", **settings)
    engine, results = llm.llm_engine, {}
    for size in BATCH_SIZES:
        params = SamplingParams(temperature=0, max_tokens=NUM_STEPS + 100, ignore_eos=True, detokenize=False)
        ids = [f"{size}-{number}" for number in range(size)]
        for number, request_id in enumerate(ids):
            engine.add_request(request_id, {"prompt_token_ids": [300 + number, 400, 500]}, params)
        for _ in range(NUM_WARM_STEPS):
            engine.step()
        steps = []
        for _ in range(NUM_STEPS):
            spent["schedule and update"] = 0.0
            start = time.thread_time()
            engine.step()
            steps.append((spent["schedule and update"], time.thread_time() - start))
        engine.discard_requests(ids)
        while engine.has_unfinished_requests():
            engine.step()
        results[str(size)] = {
            part: 1e6 * sorted(one[index] for one in steps)[NUM_STEPS // 10] for index, part in enumerate(PARTS)
        }
    llm.shutdown()
    return results


if __name__ == "__main__":
    print(json.dumps(measure()))
