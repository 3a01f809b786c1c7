"""Whether serving became slower: the servers of two trees, loaded in turn.

Both servers run all the time, each from the environment of its own tree; only one is loaded at a time. A round loads
each of them once at each concurrency (streams as in `bench_overhead`), every second round in the other order, so that
a slow minute of the machine falls on both. Prints for each concurrency the median over the rounds of new / old, with
its quartiles: tokens/s (above 1 is faster), and CPU time per token outside and inside the core (below 1 is cheaper).
The last line is one JSON object.

    git worktree add ../before COMMIT && make -C ../before .venv/.demo
    python -m benchmarks.server.bench_trees ../before/.venv/bin/quire --model leaf --rounds 15
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks.server.bench_overhead import NUM_OUT, measure, start_server

COLUMNS = ("tokens_per_s", "ttft_p50_ms", "front_end_cpu_us_per_token", "core_cpu_us_per_token")
Load = Callable[[int, int], dict[str, float]]  # concurrency, number of requests -> figures


def compare(loads: dict[str, Load], concurrency: int, rounds: int, seconds: float) -> dict[str, list[float]]:
    """For each column the quartiles of new / old over the rounds."""
    num_requests = min(requests_in(seconds, load, concurrency) for load in loads.values())
    ratios: dict[str, list[float]] = {column: [] for column in COLUMNS}
    for turn in range(rounds):
        names = ("new", "old") if turn % 2 else ("old", "new")
        found = {name: loads[name](concurrency, num_requests) for name in names}
        for column in COLUMNS:
            ratios[column].append(found["new"][column] / found["old"][column])
    return {column: [round(one, 3) for one in statistics.quantiles(values, n=4)] for column, values in ratios.items()}


def requests_in(seconds: float, load: Load, concurrency: int) -> int:
    """How many requests fill `seconds`, found by a first load that also warms the server up."""
    return max(concurrency, round(seconds * load(concurrency, 2 * concurrency)["tokens_per_s"] / NUM_OUT))


def compare_trees(
    model: str, old: str, args: argparse.Namespace, flags: list[str]
) -> dict[str, dict[str, list[float]]]:
    """Both servers, started and ended; the results by concurrency."""
    servers = {name: start_server(model, flags, quire) for name, quire in (("new", None), ("old", old))}
    try:
        loads: dict[str, Load] = {
            name: partial(measure, port, {"front_end": process.pid, "core": core_pid})
            for name, (process, port, core_pid) in servers.items()
        }
        results = {}
        for concurrency in args.concurrency:
            results[str(concurrency)] = compare(loads, concurrency, args.rounds, args.seconds)
            print(f"{concurrency} streams at a time, new / old: {results[str(concurrency)]}", flush=True)
        return results
    finally:
        for process, _, _ in servers.values():
            process.terminate()
            process.communicate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", metavar="QUIRE", help="the other tree's program, .venv/bin/quire")
    parser.add_argument("--model", help="name or directory; default: a llama-tiny checkpoint in a temporary one")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each load")
    args, flags = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as directory:
        model = args.model
        if model is None:
            from benchmarks.checkpoints import train_tokenizer, write_checkpoint

            write_checkpoint("llama-tiny", Path(directory), train_tokenizer())
            model = directory
        print(json.dumps(compare_trees(model, args.old, args, flags)))


if __name__ == "__main__":
    main()
