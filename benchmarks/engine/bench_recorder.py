"""What the flight recorder costs: CPU time of a step of the engine with and without it, and bytes per step.

    python -m benchmarks.engine.bench_recorder --model leaf

CPU time of the whole process (all threads, the recorder's included) over the same requests, in turns. The last line is
one JSON object.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from quire import LLM, SamplingParams
from quire.core.sampling_params import RequestOutputKind

MAX_PROMPT = 64


def make_llm(model: str, recorder: Path | None) -> LLM:
    """An engine with room for the requests; recorded when there is a directory."""
    directory = None if recorder is None else str(recorder)
    return LLM(
        model, flight_recorder=directory, enable_prefix_caching=True, gpu_memory_utilization=0.3,
        speculative_config="off",
    )  # fmt: skip


def run_once(llm: LLM, num_reqs: int, output_len: int, rng: random.Random) -> tuple[float, float, int]:
    """(CPU seconds, seconds, steps) of requests that come together."""
    params = SamplingParams(
        temperature=0,
        max_tokens=output_len,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    for number in range(num_reqs):
        prompt = {"prompt_token_ids": [rng.randrange(300, 1000) for _ in range(rng.randint(8, MAX_PROMPT))]}
        llm.llm_engine.add_request(f"{number}", prompt, params)
    cpu, wall, steps = time.process_time(), time.perf_counter(), 0
    while llm.llm_engine.has_unfinished_requests():
        llm.llm_engine.step()
        steps += 1
    return time.process_time() - cpu, time.perf_counter() - wall, steps


def measure(model: str, num_reqs: int, output_len: int, rounds: int) -> dict[str, Any]:
    """Medians over rounds in turns, per step."""
    with tempfile.TemporaryDirectory() as directory:
        engines = {"without": make_llm(model, None), "with": make_llm(model, Path(directory))}
        cpu: dict[str, list[float]] = {name: [] for name in engines}
        wall: dict[str, list[float]] = {name: [] for name in engines}
        num_steps = 0
        for number in range(rounds + 1):
            for name in ("without", "with") if number % 2 else ("with", "without"):
                cpu_s, wall_s, steps = run_once(engines[name], num_reqs, output_len, random.Random(number))
                if number:  # the first round warms up
                    cpu[name].append(cpu_s / steps)
                    wall[name].append(wall_s / steps)
                    num_steps += steps if name == "with" else 0
        for engine in engines.values():
            engine.shutdown()
        num_bytes = sum(path.stat().st_size for path in Path(directory).iterdir())
    medians = {name: statistics.median(values) for name, values in cpu.items()}
    walls = {name: statistics.median(values) for name, values in wall.items()}
    return {
        "num_reqs": num_reqs,
        "cpu_us_without": 1e6 * medians["without"],
        "cpu_us_with": 1e6 * medians["with"],
        "cpu_overhead": medians["with"] / medians["without"] - 1,
        "wall_us_without": 1e6 * walls["without"],
        "wall_us_with": 1e6 * walls["with"],
        "wall_overhead": walls["with"] / walls["without"] - 1,
        "bytes_per_step": num_bytes / num_steps * rounds / (rounds + 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="leaf")
    parser.add_argument("--num-reqs", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    results = []
    for num_reqs in args.num_reqs:
        result = measure(args.model, num_reqs, args.output_len, args.rounds)
        results.append(result)
        wall = f"wall {result['wall_us_without']:.1f}, {result['wall_us_with']:.1f} ({result['wall_overhead']:+.2%})"
        print(
            f"{num_reqs:>4} requests: CPU {result['cpu_us_without']:.1f} us a step without, "
            f"{result['cpu_us_with']:.1f} with "
            f"({result['cpu_overhead']:+.2%}); {wall}; {result['bytes_per_step']:.0f} bytes a step",
            flush=True,
        )
    print(json.dumps({"benchmark": "flight recorder", "model": args.model, "results": results}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
