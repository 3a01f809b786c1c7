"""What a run of the thread pool costs: empty, per task, after sleep, and beside a busy Python thread.

python benchmarks/kernels/bench_pool.py [--threads 2]

Every figure is a median of one C++ loop; the ceiling is the same loop on one thread, which starts nobody.
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time

from quire.kernels.native.runtime import DEFAULT_SPIN_US, NativeRuntime


def probe(runtime: NativeRuntime, runs: int, tasks: int, task_ns: int = 0, pause_us: int = 0) -> float:
    """Median time of a run in microseconds; ends the benchmark when a task did not run exactly once."""
    num_wrong, median_ns, _, _ = runtime.library.probe_pool(runtime.pool, runs, tasks, task_ns, pause_us)
    if num_wrong:
        raise SystemExit(f"{num_wrong} tasks did not run exactly once")
    return float(median_ns) / 1000


def beside_python(runtime: NativeRuntime, num_busy: int) -> tuple[float, float]:
    """Steps of ten kernels of 200 us each with a pause of 300 us, beside `num_busy` Python threads.

    Returns:
        (median time of a kernel in microseconds, loops a second of the Python threads).
    """
    stop, counts = threading.Event(), [0] * num_busy

    def work(which: int) -> None:
        while not stop.is_set():
            counts[which] += 1

    busy = [threading.Thread(target=work, args=(which,)) for which in range(num_busy)]
    for thread in busy:
        thread.start()
    times, started = [], time.perf_counter()
    while time.perf_counter() - started < 1.5:
        times.append(probe(runtime, runs=10, tasks=2 * runtime.num_threads, task_ns=100_000))
        time.sleep(300e-6)
    stop.set()
    for thread in busy:
        thread.join()
    return statistics.median(times), sum(counts) / (time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--spin-us", type=int, default=DEFAULT_SPIN_US)
    args = parser.parse_args()
    alone, pool = NativeRuntime("portable"), NativeRuntime("portable", args.threads, spin_us=args.spin_us)
    result: dict[str, float] = {"threads": args.threads, "spin_us": args.spin_us}
    probe(pool, runs=1000, tasks=2)
    result["empty_run_us"] = probe(pool, runs=20_000, tasks=args.threads)
    result["empty_run_alone_us"] = probe(alone, runs=20_000, tasks=args.threads)
    result["task_us"] = (probe(pool, runs=500, tasks=1000) - probe(pool, runs=500, tasks=args.threads)) / 1000
    sleepy = NativeRuntime("portable", args.threads, spin_us=0)
    result["empty_run_asleep_us"] = probe(sleepy, runs=300, tasks=args.threads, pause_us=300)
    work = {"tasks": args.threads, "task_ns": 200_000}
    result["run_of_200_us_asleep_us"] = probe(sleepy, runs=300, pause_us=300, **work)
    result["run_of_200_us_awake_us"] = probe(pool, runs=300, pause_us=300, **work)
    for num_busy in (0, 1, 2):
        kernel_us, loops = beside_python(pool, num_busy)
        result[f"kernel_us_beside_{num_busy}"] = kernel_us
        result[f"python_loops_a_second_{num_busy}"] = loops
    for name, value in result.items():
        print(f"{name:28} {value:14.3f}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
