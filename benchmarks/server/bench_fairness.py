"""One tenant floods `quire serve`, nine others send little: how long the light ones wait for their first token.

Light tenants send a short prompt now and then (at random, the same times in every run), each in a stream of its own;
the flood keeps many streams going, some of them with long prompts. Light tenants' p95 time to the first token (TTFT) is
measured without the flood, with it under `fcfs`, and with it under `fair`. With `--weights`, three tenants with weights
1, 2 and 4 keep more streams going than the engine holds, and the tokens that each gets are compared with its weight.
Flags that are not its own go to `quire serve`. The last line is one JSON object.

    python -m benchmarks.server.bench_fairness
    python -m benchmarks.server.bench_fairness --weights
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from benchmarks.server.bench_overhead import Client, start_server

NUM_LIGHT = 9
VOCAB_SIZE = 3000
WEIGHTS = {"one": 1, "two": 2, "four": 4}
# Few rows, so that the flood fills them; steps that are short beside what a first token takes anyhow.
FLAGS = ["--max-num-seqs", "16", "--max-num-batched-tokens", "512"]


def key_of(tenant: str) -> str:
    return f"key-of-tenant-{tenant}"


def percentile(values: list[float], percent: float) -> float:
    return float(np.percentile(values, percent))


def write_keys(path: Path, weights: dict[str, int]) -> None:
    lines = [f"  {name}: {{keys: [{key_of(name)}], weight: {weight}}}" for name, weight in weights.items()]
    path.write_text("\n".join(["tenants:", *lines]) + "\n")


def request_body(rng: random.Random, num_in: int, num_out: int) -> bytes:
    fields = {
        "prompt": [rng.randrange(5, VOCAB_SIZE) for _ in range(num_in)], "max_tokens": num_out, "temperature": 0,
        "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    return json.dumps(fields).encode()


class Tenants:
    """Streams of tenants, each on a connection of its own.

    Attributes:
        num_tokens: new tokens of whole answers, by tenant.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self.num_tokens: Counter[str] = Counter()

    async def ask(self, tenant: str, body: bytes) -> float:
        """One answer; seconds to its first token."""
        loop = asyncio.get_running_loop()
        transport, client = await loop.create_connection(Client, "127.0.0.1", self._port)
        try:
            stream = await client.ask(body, b"authorization: Bearer " + key_of(tenant).encode() + b"\r\n")
        finally:
            transport.close()
        self.num_tokens[tenant] += stream.num_tokens
        return stream.ttft_s


async def flood(tenants: Tenants, name: str, seed: int, sizes: list[tuple[int, int]]) -> None:
    """One stream after the other, for ever; `sizes` are tokens in and out, one after the other."""
    rng = random.Random(seed)
    for i in range(sys.maxsize):
        await tenants.ask(name, request_body(rng, *sizes[(seed + i) % len(sizes)]))


async def light(tenants: Tenants, name: str, args: argparse.Namespace) -> list[float]:
    """A request now and then; seconds to the first token of each."""
    rng = random.Random(name)
    waits: list[asyncio.Task[float]] = []
    end = time.perf_counter() + args.seconds
    while True:
        await asyncio.sleep(rng.expovariate(args.rate))
        if time.perf_counter() > end:
            return await asyncio.gather(*waits)
        waits.append(asyncio.ensure_future(tenants.ask(name, request_body(rng, args.num_in, args.num_out))))


async def run_light(port: int, args: argparse.Namespace, *, is_flooded: bool) -> dict[str, float]:
    tenants = Tenants(port)
    sizes = [(args.num_in, args.flood_out), (args.flood_in, args.flood_out)]
    floods = [
        asyncio.ensure_future(flood(tenants, "flood", seed, sizes)) for seed in range(args.streams if is_flooded else 0)
    ]
    if is_flooded:
        await asyncio.sleep(2.0)  # until it has all rows
    before = tenants.num_tokens["flood"]
    start = time.perf_counter()
    found = await asyncio.gather(*(light(tenants, f"light{i}", args) for i in range(NUM_LIGHT)))
    flood_rate = (tenants.num_tokens["flood"] - before) / (time.perf_counter() - start)
    await cancel(floods)
    waits = [wait for one in found for wait in one]
    return {
        "requests": len(waits), "ttft_p50_ms": 1e3 * percentile(waits, 50), "ttft_p95_ms": 1e3 * percentile(waits, 95),
        "flood_tokens_per_s": flood_rate,
    }  # fmt: skip


async def run_weights(port: int, args: argparse.Namespace) -> dict[str, float]:
    """Tokens of each tenant over its weight, relative to the mean of all."""
    tenants = Tenants(port)
    floods = [
        asyncio.ensure_future(flood(tenants, name, seed, [(args.num_in, args.num_out)]))
        for name in WEIGHTS
        for seed in range(args.streams)
    ]
    await asyncio.sleep(2.0)
    before = dict(tenants.num_tokens)
    await asyncio.sleep(args.seconds)
    shares = {name: (tenants.num_tokens[name] - before.get(name, 0)) / weight for name, weight in WEIGHTS.items()}
    await cancel(floods)
    mean = sum(shares.values()) / len(shares)
    return {name: share / mean for name, share in shares.items()}


async def cancel(tasks: list[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    for task in tasks:
        with suppress(asyncio.CancelledError):
            await task


def serve_and_run(policy: str, flags: list[str], weights: dict[str, int], work: Any) -> list[Any]:
    """Results of each of `work`: functions of the port to coroutines, in turn on one server."""
    with tempfile.TemporaryDirectory() as directory:
        keys = Path(directory) / "keys.yaml"
        write_keys(keys, weights if policy == "fair" else dict.fromkeys(weights, 1))
        own = ["--scheduling-policy", policy, "--api-key-file", str(keys), *FLAGS]
        server, port, _ = start_server("leaf", [*own, *flags])
        try:
            return [uvloop.run(one(port)) for one in work]
        finally:
            server.terminate()
            server.communicate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30.0, help="of each run")
    parser.add_argument("--rate", type=float, default=1.0, help="requests a second of each light tenant")
    parser.add_argument("--num-in", type=int, default=256, help="tokens of a light prompt")
    parser.add_argument("--num-out", type=int, default=32, help="tokens of a light answer")
    parser.add_argument("--streams", type=int, default=32, help="that the flood keeps going")
    parser.add_argument("--flood-in", type=int, default=1024, help="tokens of every second prompt of the flood")
    parser.add_argument("--flood-out", type=int, default=128, help="tokens of its answers")
    parser.add_argument("--weights", action="store_true", help="compare tokens with weights instead")
    args, flags = parser.parse_known_args()
    if args.weights:
        [shares] = serve_and_run("fair", flags, WEIGHTS, [lambda port: run_weights(port, args)])
        worst = max(abs(share - 1) for share in shares.values())
        print(f"tokens over weight, relative to the mean: {shares}")
        print(json.dumps({"shares": shares, "worst_deviation": worst}))
        return
    weights = {"flood": 1, **{f"light{i}": 1 for i in range(NUM_LIGHT)}}
    report: dict[str, Any] = {}
    for policy in ("fcfs", "fair"):
        runs = [
            lambda port: run_light(port, args, is_flooded=False),
            lambda port: run_light(port, args, is_flooded=True),
        ]
        for name, result in zip(("solo", "flooded"), serve_and_run(policy, flags, weights, runs), strict=True):
            report[f"{policy}_{name}"] = result
            print(f"{policy}, {name}: { {key: round(value, 1) for key, value in result.items()} }", flush=True)
    for policy in ("fcfs", "fair"):
        ratio = report[f"{policy}_flooded"]["ttft_p95_ms"] / report[f"{policy}_solo"]["ttft_p95_ms"]
        report[f"{policy}_ratio"] = ratio
        print(f"{policy}: light tenants' p95 TTFT under the flood is {ratio:.2f} times that without")
    print(json.dumps(report))


if __name__ == "__main__":
    main()
