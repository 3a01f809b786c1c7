"""What a streamed token costs each process of a server with one front end, and with two, before an engine that costs
nothing (`tests.scripted`).

Streams are read by this process at a pace that one front end keeps up with. From CPU seconds of each process follows
how many tokens a second its busiest one could carry on a core of its own; the last line compares that of two front ends
with that of one. This holds on any machine, however many cores it has; `--wall` offers more than one front end can
carry, and compares the events that came: for a machine with a core for each process and two for this one.

    python -m benchmarks.server.bench_front_ends
"""

from __future__ import annotations

import argparse
import json
import os
import selectors
import socket
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from tests.robustness.http_streams import request_bytes
from tests.robustness.server_process import ServerProcess, cores_of, front_ends_of
from tests.scripted.executor import scripted_environment

TICK_S = 1 / os.sysconf("SC_CLK_TCK")
FLAGS = ("--distributed-executor-backend", "scripted", "--disable-access-log", "--disable-log-stats")
MAX_TOKENS = 1900
SETTLE_S = 1.0
TARGET = 1.7


@dataclass(frozen=True)
class Result:
    """One run.

    Attributes:
        tokens: engine's; events: of streams; both within the window.
        cpu_us: per token, by process; the busiest of the front ends.
    """

    seconds: float
    tokens: int
    events: int
    cpu_us: dict[str, float]

    @property
    def capacity(self) -> float:
        """Tokens a second with a core for each process of the server but the engine's."""
        return 1e6 / max(self.cpu_us["front end"], self.cpu_us["owner"])


class Streams:
    """Open streams, whose events are counted."""

    def __init__(self, port: int, count: int) -> None:
        self._selector = selectors.DefaultSelector()
        self.num_events = 0
        body = {"model": "leaf", "prompt": "Once", "max_tokens": MAX_TOKENS, "ignore_eos": True, "stream": True}
        request = request_bytes("/v1/completions", body)
        for _ in range(count):
            client = socket.create_connection(("127.0.0.1", port))
            client.sendall(request)
            client.setblocking(False)
            self._selector.register(client, selectors.EVENT_READ)

    def read(self, seconds: float) -> None:
        """Count what comes for a while."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            for key, _ in self._selector.select(left):
                data = key.fileobj.recv(1 << 16)  # type: ignore[union-attr]
                if not data:
                    raise RuntimeError("a stream has ended within the window: ask for fewer seconds")
                self.num_events += data.count(b"data: ")

    def close(self) -> None:
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]


def cpu_s(pid: int) -> float:
    """CPU seconds that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * TICK_S


def measure(count: int, streams: int, seconds: float, step_ms: float) -> Result:
    """A server with so many front ends."""
    with tempfile.TemporaryDirectory() as directory:
        environment = scripted_environment(Path(directory), step_ms)
        flags = (*FLAGS, "--api-server-count", str(count), "--max-num-seqs", str(streams))
        with ServerProcess(*flags, environment=environment) as server:
            fronts = front_ends_of(server.pid) or [server.pid]
            groups = {"front end": fronts, "core": cores_of(server.pid), "generator": [os.getpid()],
                      "owner": [server.pid] if count > 1 else []}  # fmt: skip
            clients = Streams(server.port, streams)
            clients.read(SETTLE_S)
            before = {pid: cpu_s(pid) for pids in groups.values() for pid in pids}
            start, events = time.monotonic(), clients.num_events
            clients.read(seconds)
            took, events = time.monotonic() - start, clients.num_events - events
            used = {name: [cpu_s(pid) - before[pid] for pid in pids] for name, pids in groups.items()}
            clients.close()
    tokens = round(took / (step_ms / 1e3)) * streams if step_ms else events
    return Result(
        took, tokens, events, {name: 1e6 * max(each, default=0.0) / max(1, events) for name, each in used.items()}
    )


def main() -> int:
    """Exit code 0 when two front ends carry `TARGET` times the tokens of one."""
    parser = argparse.ArgumentParser(prog="make bench-front-ends")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--wall", action="store_true", help="offer 50,000 tokens a second and compare what came")
    arguments = parser.parse_args()
    step_ms = 1e3 * arguments.streams / 50_000 if arguments.wall else arguments.step_ms
    results = {count: measure(count, arguments.streams, arguments.seconds, step_ms) for count in (1, 2)}
    for count, one in results.items():
        costs = ", ".join(f"{name} {us:.1f}" for name, us in one.cpu_us.items() if us)
        print(f"{count} front end(s): {one.events / one.seconds:.0f} events per second; CPU us per event of all, "
              f"by the busiest process of a kind: {costs}")  # fmt: skip
    if arguments.wall:
        ratio = results[2].events / results[2].seconds / (results[1].events / results[1].seconds)
    else:
        ratio = results[2].capacity / results[1].capacity
    print(json.dumps({"ratio": round(ratio, 3), **{f"cpu_us_{count}": one.cpu_us for count, one in results.items()}}))
    return int(ratio < TARGET)


if __name__ == "__main__":
    sys.exit(main())
