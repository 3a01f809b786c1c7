"""Predictions of `quire plan` for ranks and replicas against reality, in one sitting on this machine.

    python -m benchmarks.server.bench_plan_parallel [--models leaf build/checkpoints/llama-1b] [--calibrate-seconds 45]

Two calibrations are made of each model: one process with all threads, and replicas with one thread each, at once. The
exchange between ranks is measured by `bench_communicator`. From these three, output tokens per second are predicted of
one process with all threads, of ranks with one thread each, and of replicas; then each serves the same loads: batches
of requests that all come at once. Loads of one deployment run in turns with the others', `--repeats` times; measured is
the median. At last: an 8-GPU and a 4-socket deployment, which are simulated. The worst relative error is printed last.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import checkpoints
from quire.config.build import build_config
from quire.engine.async_llm import AsyncLLM
from quire.models.hub import resolve_model_path
from quire.models.model_dir import read_model_dir
from quire.plan.calibrate import calibrate, machine_name
from quire.plan.live import LiveClient
from quire.scheduler.setup import SchedulerSetup
from quire.simulator.calibration import CalibratedCosts
from quire.simulator.costs import CostModel
from quire.simulator.divided import DividedCosts
from quire.simulator.division import Division, Exchanges
from quire.simulator.fleet import FleetSetup, simulate
from quire.simulator.interconnect import Interconnect, read_interconnect
from quire.simulator.results import Results, Slo, figures
from quire.simulator.workload import SimRequest

COMMUNICATOR = Path(__file__).parent.parent / "kernels" / "bench_communicator.py"
PROMPT_LEN = 32
NUM_SEEDS = 3
SIMULATED = (
    ("8 GPUs", ("--hardware", "H100", "-tp", "8", "--interconnect", "nvlink", "--rate", "8")),
    ("4 sockets", ("--hardware", "Xeon", "-tp", "4", "--interconnect", "socket", "--rate", "0.5")),
)
LLAMA_70B = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 128256, "hidden_size": 8192, "intermediate_size": 28672,
    "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """One way to use the machine: settings of the engine, and the costs that predict it, made from a seed."""

    name: str
    settings: dict[str, Any]
    setup: SchedulerSetup
    costs: Callable[[int], CostModel]
    num_replicas: int = 1

    def predict(self, size: int, num_tokens: int) -> float:
        """Output tokens per second: the mean over a few seeds."""
        rates = []
        for seed in range(NUM_SEEDS):
            fleet = FleetSetup(
                scheduler=self.setup, costs=partial(self.costs, seed), num_replicas=self.num_replicas,
                routing="data-parallel",
            )  # fmt: skip
            rates.append(rate_of(simulate(fleet, load_of(size, num_tokens, 0))))
        return statistics.fmean(rates)


def measure_interconnect(num_ranks: int, rounds: int) -> Interconnect:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "this machine")
        arguments = ["--ranks", str(num_ranks), "--rounds", str(rounds), "--out", str(path)]
        subprocess.run([sys.executable, str(COMMUNICATOR), *arguments], check=True, stdout=subprocess.DEVNULL)
        return read_interconnect(path)


def deployments(model: str, cores: int, seconds: float, link: Interconnect) -> list[Deployment]:
    """Calibrated: one process, ranks and replicas, all on the same cores."""

    def note(line: str) -> None:
        print(f"  {line}", flush=True)

    one = calibrate(build_config(model=model, num_threads=cores), seconds, note)
    beside = calibrate(build_config(model=model, num_threads=1, data_parallel_size=cores), seconds, note)
    for name, found in (("one process", one), ("replicas", beside)):
        print(f"{model}: {name}: {found.num_steps} steps, half within {found.median_error:.1%}", flush=True)
    arch = read_model_dir(resolve_model_path(model, None, None)).arch()
    exchanges = Exchanges(arch, Division(num_ranks=cores), 2, link, link)
    # The ranks have as many cores together as the process that was calibrated: the products take as long.
    return [
        Deployment(
            name=f"1 process x {cores} threads", settings={"num_threads": cores}, setup=one.setup,
            costs=partial(CalibratedCosts, one),
        ),
        Deployment(
            name=f"TP {cores} x 1 thread", settings={"num_threads": 1, "tensor_parallel_size": cores},
            setup=one.setup, costs=lambda seed: DividedCosts(one, seed, 1.0, exchanges),
        ),
        Deployment(
            name=f"DP {cores} x 1 thread", settings={"num_threads": 1, "data_parallel_size": cores},
            setup=beside.setup, costs=partial(CalibratedCosts, beside), num_replicas=cores,
        ),
    ]  # fmt: skip


def load_of(size: int, num_tokens: int, stream: int) -> list[SimRequest]:
    return [
        SimRequest(arrival_s=0.0, prompt_len=PROMPT_LEN, output_len=num_tokens, stream=stream + number)
        for number in range(size)
    ]


def rate_of(results: Results) -> float:
    return float(figures(results, Slo())["output_throughput"])


def serve(model: str, deployment: Deployment, loads: list[list[SimRequest]]) -> list[float]:
    """Output tokens per second of each load."""
    engine = AsyncLLM.from_config(build_config(model=model, speculative_config="off", **deployment.settings))

    async def run() -> list[float]:
        client = LiveClient(engine)
        await client.run(load_of(4, 8, -10))  # captures steps
        return [rate_of(await client.run(load)) for load in loads]

    try:
        return asyncio.run(run())
    finally:
        engine.shutdown()


def bench(model: str, args: argparse.Namespace, link: Interconnect) -> list[dict[str, Any]]:
    found = deployments(model, args.cores, args.calibrate_seconds, link)
    sizes = [int(size) for size in args.batch.split(",")]
    predicted = [[one.predict(size, args.tokens) for size in sizes] for one in found]
    measured: list[list[list[float]]] = [[] for _ in found]
    for turn in range(args.repeats):
        loads = [load_of(size, args.tokens, 1000 * (turn + 1) + 100 * number) for number, size in enumerate(sizes)]
        for one, rates in zip(found, measured, strict=True):
            rates.append(serve(model, one, loads))
    rows = []
    for one, expected, rates in zip(found, predicted, measured, strict=True):
        for place, size in enumerate(sizes):
            real = statistics.median(rate[place] for rate in rates)
            error = abs(expected[place] - real) / real
            rows.append(
                {"model": model, "deployment": one.name, "requests": size, "predicted": round(expected[place], 2),
                 "measured": round(real, 2), "error": round(error, 4)}
            )  # fmt: skip
            print(
                f"{one.name:>24} {size:4d} requests: predicted {expected[place]:9.1f}, measured {real:9.1f} output "
                f"tokens/s ({error:.1%})", flush=True,
            )  # fmt: skip
    return rows


def print_simulated() -> None:
    """Deployments of other machines, Llama 3 70B's shape."""
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "config.json").write_text(json.dumps(LLAMA_70B))
        for name, flags in SIMULATED:
            load = ("--num-requests", "100", "--prompt-tokens", "1000", "--output-tokens", "200", "--json")
            command = [sys.executable, "-m", "quire", "plan", "--model", directory, *flags, *load]
            answer = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            rank, step = answer["basis"]["memory"][0], answer["steps"][1]
            print(
                f"simulated, {name} ({' '.join(flags)}), Llama 3 70B: {rank['weights_bytes'] / 1e9:.1f} GB of weights "
                f"on each, {answer['kv_tokens']} tokens of KV cache, a decode step of {step['requests']} in "
                f"{1e3 * step['step_s']:.1f} ms ({step['exchange_s'] / step['step_s']:.0%} exchanges), "
                f"{answer['figures']['output_throughput']:.0f} output tokens/s"
            )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["leaf", "build/checkpoints/llama-1b"])
    parser.add_argument("--cores", type=int, default=2, help="ranks and replicas, and threads of the one process")
    parser.add_argument("--calibrate-seconds", type=float, default=45.0)
    parser.add_argument("--batch", default="1,32", help="requests at once")
    parser.add_argument("--tokens", type=int, default=64, help="output tokens of each")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=300, help="of the communicator's benchmark")
    args = parser.parse_args()
    link = measure_interconnect(args.cores, args.rounds)
    rows: list[dict[str, Any]] = []
    for model in args.models:
        path = Path(model)
        if path.name in checkpoints.SHAPES and not (path / "config.json").exists():
            checkpoints.write_checkpoint(path.name, path, checkpoints.train_tokenizer())
        rows += bench(model, args, link)
    print_simulated()
    print(json.dumps({"benchmark": "plan-parallel", "machine": machine_name(), "rows": rows}))
    print(f"worst relative error: {max(row['error'] for row in rows):.1%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
