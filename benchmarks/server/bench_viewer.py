"""What one viewer of the page costs the streams of a loaded server: their gaps between tokens, and CPU time.

    python -m benchmarks.server.bench_viewer --streams 500 --seconds 20 --rounds 6

`quire serve leaf` streams to `--streams` clients at once. In every second window a viewer reads `/debug/state` as the
page does, one state a second, from a process of its own; windows with and without alternate in their order. A window's
gaps are those between one token and the next of a stream, without the wait for a first token. The last line is one
JSON object: milliseconds, medians of the windows, and `p99_ratio`, the median of pairs, 1 = a viewer costs nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from typing import Any

import numpy as np

from benchmarks.server.bench_overhead import cpu_seconds
from benchmarks.server.neighbour_attacks import open_request
from tests.robustness.server_process import ServerProcess, children_of

VIEWER = """
import http.client, sys, time
connection = http.client.HTTPConnection("127.0.0.1", int(sys.argv[1]))
connection.request("GET", "/debug/state", headers={"accept": "text/event-stream"})
answer = connection.getresponse()
assert answer.status == 200, answer.status
while answer.readline():
    pass
"""
SETTLE_S = 2.0
MAX_TOKENS = 600


class Streams:
    """Streams that never end, as each is followed by another, and the gaps of their tokens."""

    def __init__(self, port: int, count: int) -> None:
        self.gaps: list[float] = []
        self.num_tokens = 0
        self._port = port
        self._tasks = [asyncio.ensure_future(self._run(number)) for number in range(count)]

    def take(self) -> list[float]:
        """The gaps since the last call; raises what ended a stream."""
        for task in self._tasks:
            if task.done():
                task.result()
        gaps, self.gaps = self.gaps, []
        return gaps

    async def _run(self, number: int) -> None:
        for turn in range(10**9):
            prompt = [number % 2500 + 5, turn % 2500 + 10, 7] * 10
            # Lengths differ, so that not all streams end in one step.
            body = {"prompt": prompt, "max_tokens": MAX_TOKENS + number % 200, "ignore_eos": True, "stream": True}
            reader, writer = await open_request(self._port, "/v1/completions", {**body, "temperature": 0}, "none")
            last = 0.0
            while line := await reader.readline():
                if line.startswith(b"data: {"):
                    now = time.perf_counter()
                    if last:
                        self.gaps.append(now - last)
                    last = now
            assert last, "a stream had no token"
            writer.close()


def cpu_of(server: ServerProcess) -> dict[str, float]:
    """CPU seconds so far: of the front end, and of the engine core."""
    return {"front_end": cpu_seconds(server.pid), "core": sum(map(cpu_seconds, children_of(server.pid)))}


async def window(server: ServerProcess, streams: Streams, seconds: float, is_viewed: bool) -> dict[str, float]:
    """Figures of some seconds, after the change has settled."""
    command = [sys.executable, "-c", VIEWER, str(server.port)]
    viewer = subprocess.Popen(command) if is_viewed else None
    try:
        await asyncio.sleep(SETTLE_S)
        streams.take()
        before, start = cpu_of(server), time.perf_counter()
        await asyncio.sleep(seconds)
        gaps, lasted = streams.take(), time.perf_counter() - start
        spent = {f"{name}_cpu": (after - before[name]) / lasted for name, after in cpu_of(server).items()}
        if viewer is not None and viewer.poll() is not None:
            sys.exit("the viewer ended")
    finally:
        if viewer is not None:
            viewer.kill()
            viewer.wait()
    p50, p99 = 1e3 * np.percentile(gaps, [50, 99])
    return {"p50_ms": p50, "p99_ms": p99, "tokens_per_s": len(gaps) / lasted, **spent}


async def measure(server: ServerProcess, args: argparse.Namespace) -> dict[str, Any]:
    """All windows."""
    streams = Streams(server.port, args.streams)
    await asyncio.sleep(3 * SETTLE_S)
    found: dict[bool, list[dict[str, float]]] = {False: [], True: []}
    for number in range(args.rounds):
        for is_viewed in (False, True) if number % 2 else (True, False):
            figures = await window(server, streams, args.seconds, is_viewed)
            found[is_viewed].append(figures)
            shown = "  ".join(f"{name} {value:.3f}" for name, value in figures.items())
            print(f"{'viewed' if is_viewed else 'alone ':6}  {shown}", flush=True)
    names = {False: "alone", True: "viewed"}
    figures_of = {
        names[is_viewed]: {name: round(statistics.median(one[name] for one in ones), 3) for name in ones[0]}
        for is_viewed, ones in found.items()
    }
    ratio = statistics.median(b["p99_ms"] / a["p99_ms"] for a, b in zip(found[False], found[True], strict=True))
    return {**figures_of, "p99_ratio": round(ratio, 4)}


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--rounds", type=int, default=6)
    args = parser.parse_args()
    rows, blocks = max(8, args.streams), 64 * max(8, args.streams)
    flags = ("--max-num-seqs", str(rows), "--num-gpu-blocks-override", str(blocks), "--disable-access-log")
    with ServerProcess(*flags) as server:
        print(json.dumps(asyncio.run(measure(server, args))))


if __name__ == "__main__":
    main()
