"""Predictions of `quire plan` against reality: loads that no calibration has seen, on this machine.

    python benchmarks/checkpoints.py qwen-0.5b
    python -m benchmarks.server.bench_plan --models leaf build/checkpoints/qwen-0.5b

For each model: an engine is calibrated, then ten loads are predicted, and only then run in real time through
`AsyncLLM`. The table shows goodput, p95 time to first token and p95 gap between tokens, predicted and measured, with
the relative errors, the worst load last. Each load runs `--repeats` times, all loads once before any runs again:
measured is the median, and `reality differs` is how far the runs are from it, which no prediction can undercut. Rates
are shares of the throughput that the simulation gives for all requests at once; objectives are multiples of what it
gives for one request alone. Runs alone on a machine, about ten minutes a model; the last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import statistics
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import checkpoints
from quire.config.build import build_config
from quire.engine.async_llm import AsyncLLM
from quire.plan.calibrate import calibrate, machine_name
from quire.plan.live import LiveClient
from quire.simulator.calibration import CalibratedCosts, Calibration, save_calibration
from quire.simulator.fleet import FleetSetup, simulate
from quire.simulator.results import Slo, figures
from quire.simulator.workload import Lengths, SimRequest, SyntheticLoad

METRICS = ("goodput", "p95_ttft_ms", "p95_itl_ms")
NUM_SEEDS = 3
TTFT_OF_SOLO, ITL_OF_SOLO = 10.0, 4.0
LIMIT = 0.20
STREAMS_APART = 1_000_000
MAX_LEN = 1500


@dataclass(frozen=True, kw_only=True)
class TraceKind:
    """One load: its rate as a share of capacity, and what its requests are like."""

    name: str
    share: float
    prompt: int = 120
    output: int = 32
    spread: float = 0.8
    burstiness: float = 1.0
    prefix_len: int = 0
    num_prefixes: int = 1


TRACES = (
    TraceKind(name="poisson, light", share=0.3),
    TraceKind(name="poisson, half", share=0.5),
    TraceKind(name="poisson, heavy", share=0.75),
    TraceKind(name="bursty, light", share=0.35, burstiness=0.3),
    TraceKind(name="bursty, half", share=0.55, burstiness=0.3),
    TraceKind(name="long prompts", share=0.5, prompt=500, output=16),
    TraceKind(name="long answers", share=0.5, prompt=40, output=96),
    TraceKind(name="shared prefix", share=0.5, prefix_len=256, num_prefixes=3, prompt=60),
    TraceKind(name="short questions", share=0.6, prompt=24, output=12),
    TraceKind(name="overload", share=1.6),
)


def fleet_of(calibration: Calibration, seed: int) -> FleetSetup:
    return FleetSetup(scheduler=calibration.setup, costs=partial(CalibratedCosts, calibration, seed))


def load_of(kind: TraceKind, number: int, rate: float, seconds: float) -> list[SimRequest]:
    """About `seconds` of a load; its streams are like no other's."""
    load = SyntheticLoad(
        num_requests=max(8, int(rate * seconds)), rate=rate, burstiness=kind.burstiness,
        prompts=Lengths(mean=kind.prompt, spread=kind.spread, is_lognormal=True),
        outputs=Lengths(mean=kind.output, spread=kind.spread / 2, is_lognormal=True),
        prefix_len=kind.prefix_len, num_prefixes=kind.num_prefixes, max_model_len=MAX_LEN, seed=1000 + number,
    )  # fmt: skip
    apart = (number + 1) * STREAMS_APART
    return [dataclasses.replace(one, stream=one.stream + apart, prefix=one.prefix + apart) for one in load.make()]


def capacity(calibration: Calibration, kind: TraceKind, number: int) -> float:
    """Requests per second when all come at once."""
    requests = [dataclasses.replace(one, arrival_s=0.0) for one in load_of(kind, number, 100.0, 1.5)]
    return float(figures(simulate(fleet_of(calibration, 0), requests), Slo())["request_throughput"])


def objectives(calibration: Calibration) -> Slo:
    """Multiples of what the simulation gives for requests of the plain kind, one at a time."""
    requests = [
        dataclasses.replace(one, arrival_s=100.0 * number)
        for number, one in enumerate(load_of(TRACES[0], 99, 10.0, 3.0))
    ]  # fmt: skip
    alone = figures(simulate(fleet_of(calibration, 0), requests), Slo())
    return Slo(TTFT_OF_SOLO * alone["p50_ttft_ms"] / 1e3, ITL_OF_SOLO * alone["p50_itl_ms"] / 1e3)


def predict(calibration: Calibration, requests: list[SimRequest], slo: Slo) -> dict[str, float]:
    """Means over a few seeds."""
    found = [figures(simulate(fleet_of(calibration, seed), requests), slo) for seed in range(NUM_SEEDS)]
    return {name: statistics.fmean(one[name] for one in found) for name in METRICS}


def error_of(predicted: float, measured: float) -> float:
    """Relative; 0 when both are nothing."""
    return abs(predicted - measured) / measured if measured else float(predicted > 0)


async def run_traces(
    engine: AsyncLLM, loads: list[tuple[TraceKind, list[SimRequest], dict[str, float]]], slo: Slo, repeats: int
) -> list[dict[str, Any]]:
    client = LiveClient(engine)
    await client.run([SimRequest(arrival_s=0.0, prompt_len=20, output_len=20, stream=0)] * 2)  # warms up
    runs: list[list[dict[str, float]]] = [[] for _ in loads]
    for _ in range(repeats):
        for (kind, requests, _), found in zip(loads, runs, strict=True):
            await engine.reset_prefix_cache()
            one = figures(await client.run(requests), slo)
            found.append({name: one[name] or 0.0 for name in METRICS})
            print(f"  ran {kind.name}: {len(requests)} requests, {one['seconds']:.1f} s", flush=True)
    return [row_of(load, found) for load, found in zip(loads, runs, strict=True)]


def row_of(load: tuple[TraceKind, list[SimRequest], dict[str, float]], runs: list[dict[str, float]]) -> dict[str, Any]:
    """One line of the table; `self_errors` are the means of the runs' distances from their median."""
    kind, requests, predicted = load
    measured = {name: statistics.median(run[name] for run in runs) for name in METRICS}
    errors = {name: error_of(predicted[name], measured[name]) for name in METRICS}
    own = {name: statistics.fmean(error_of(run[name], measured[name]) for run in runs) for name in METRICS}
    return {
        "trace": kind.name, "num_requests": len(requests), "predicted": predicted, "measured": measured, "runs": runs,
        "errors": errors, "self_errors": own, "worst": max(errors.values()),
    }  # fmt: skip


def bench(
    model: str, seconds: float, calibrate_s: float, out: Path | None, num_traces: int, repeats: int
) -> dict[str, Any]:
    start = time.monotonic()
    config = build_config(model=model, speculative_config="off")
    calibration = calibrate(config, calibrate_s, lambda line: print(f"  {line}", flush=True))
    if out is not None:
        save_calibration(calibration, out)
    slo = objectives(calibration)
    print(
        f"{model}: calibrated on {calibration.num_steps} steps, half within {calibration.median_error:.1%}, "
        f"{time.monotonic() - start:.0f} s; objectives: TTFT {1e3 * slo.ttft_s:.0f} ms, ITL {1e3 * slo.itl_s:.1f} ms",
        flush=True,
    )
    loads = []
    for number, kind in enumerate(TRACES[:num_traces]):
        rate = kind.share * capacity(calibration, kind, number)
        requests = load_of(kind, number, rate, seconds)
        loads.append((kind, requests, predict(calibration, requests, slo)))
    engine = AsyncLLM.from_config(config)
    try:
        rows = asyncio.run(run_traces(engine, loads, slo, repeats))
    finally:
        engine.shutdown()
    rows.sort(key=lambda row: row["worst"])
    print_table(model, rows)
    return {"model": model, "median_fit_error": calibration.median_error, "traces": rows}


def print_table(model: str, rows: list[dict[str, Any]]) -> None:
    print(f"\n{model}: predicted / measured (error)")
    print(f"{'load':<18} {'goodput req/s':>26} {'p95 TTFT ms':>26} {'p95 ITL ms':>26}")
    for row in rows:
        cells = [
            f"{row['predicted'][name]:8.2f} /{row['measured'][name] or 0.0:8.2f} ({row['errors'][name]:5.0%})"
            for name in METRICS
        ]
        print(f"{row['trace']:<18} " + " ".join(f"{cell:>26}" for cell in cells))
    within = sum(row["worst"] <= LIMIT for row in rows)
    medians = ", ".join(f"{name} {statistics.median(row['errors'][name] for row in rows):.0%}" for name in METRICS)
    own = ", ".join(f"{name} {max(row['self_errors'][name] for row in rows):.0%}" for name in METRICS)
    print(f"{within} of {len(rows)} loads within {LIMIT:.0%} in all three; median errors: {medians}")
    print(f"reality differs from itself by at most: {own}\n", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["leaf", "build/checkpoints/qwen-0.5b"])
    parser.add_argument("--seconds", type=float, default=20.0, help="of arrivals of each load")
    parser.add_argument("--calibrate-seconds", type=float, default=90.0)
    parser.add_argument("--repeats", type=int, default=3, help="times that each load runs")
    parser.add_argument("--num-traces", type=int, default=len(TRACES))
    parser.add_argument("--save", type=Path, default=None, help="directory for the calibrations")
    args = parser.parse_args()
    results = []
    for model in args.models:
        path = Path(model)
        if path.name in checkpoints.SHAPES and not (path / "config.json").exists():
            checkpoints.write_checkpoint(path.name, path, checkpoints.train_tokenizer())
        out = None
        if args.save is not None:
            args.save.mkdir(parents=True, exist_ok=True)
            out = args.save / f"{path.name}.json"
        results.append(bench(model, args.seconds, args.calibrate_seconds, out, args.num_traces, args.repeats))
    print(json.dumps({"benchmark": "plan", "machine": machine_name(), "limit": LIMIT, "models": results}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
