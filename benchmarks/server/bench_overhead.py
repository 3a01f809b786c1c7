"""What the engine costs around a model that costs nearly nothing: `quire serve` on 11M random parameters, end to end.

Streams of random 32 tokens in and 64 out through HTTP, at each concurrency, from a client of raw sockets on the same
cores. Prints tokens/s, the time per output token after the first (TPOT), the time to the first (TTFT), and CPU
microseconds per token of the front-end's process, the engine core's and the client's. The last line is one JSON object.
Without `--model` a checkpoint is written first (`benchmarks.checkpoints`, shape llama-tiny). Flags that are not its own
go to `quire serve`.

    python -m benchmarks.server.bench_overhead --concurrency 1 64
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import uvloop

VOCAB_SIZE = 1000  # of the ids asked with: every model has these
NUM_IN, NUM_OUT = 32, 64


@dataclass(frozen=True, slots=True)
class Stream:
    """One answer as its client saw it; seconds."""

    ttft_s: float
    total_s: float
    num_tokens: int

    @property
    def tpot_s(self) -> float:
        """Seconds from one token to the next."""
        return (self.total_s - self.ttft_s) / max(1, self.num_tokens - 1)


class Client(asyncio.Protocol):
    """One connection: sends a request, notes when bytes come, until the end of the stream."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._first_s = 0.0
        self._tail = b""
        self._done: asyncio.Future[bytes] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """As `asyncio.Protocol.connection_made`."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """As `asyncio.Protocol.data_received`."""
        self._first_s = self._first_s or time.perf_counter()
        self._tail = self._tail[-1024:] + data
        if (
            self._done is not None
            and self._tail.startswith(b"HTTP/1.1 ")
            and not self._tail.startswith(b"HTTP/1.1 200")
        ):
            self._done.set_exception(SystemExit(f"the server refused: {data.decode(errors='replace')}"))
        elif self._done is not None and self._tail.endswith(b"0\r\n\r\n"):
            self._done.set_result(self._tail)

    async def ask(self, body: bytes, headers: bytes = b"") -> Stream:
        """Send a request, with more lines of its head; what became of it."""
        assert self._transport is not None
        self._first_s, self._tail = 0.0, b""
        self._done = asyncio.get_running_loop().create_future()
        start = time.perf_counter()
        head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        self._transport.write(head + headers + b"content-length: %d\r\n\r\n" % len(body) + body)
        tail = await self._done
        usage = re.search(rb'"completion_tokens":(\d+)', tail)
        assert usage is not None, tail
        return Stream(self._first_s - start, time.perf_counter() - start, int(usage[1]))


def request_body(rng: random.Random) -> bytes:
    fields = {
        "prompt": [rng.randrange(5, VOCAB_SIZE) for _ in range(NUM_IN)], "max_tokens": NUM_OUT, "temperature": 0,
        "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    return json.dumps(fields).encode()


async def run_clients(port: int, concurrency: int, num_requests: int) -> list[Stream]:
    """`num_requests` streams, `concurrency` of them at any time."""
    rng = random.Random(0)
    bodies = [request_body(rng) for _ in range(num_requests)]
    streams = []

    async def work() -> None:
        _, client = await asyncio.get_running_loop().create_connection(Client, "127.0.0.1", port)
        while bodies:
            streams.append(await client.ask(bodies.pop()))

    await asyncio.gather(*(work() for _ in range(concurrency)))
    return streams


def measure(port: int, pids: dict[str, int], concurrency: int, num_requests: int) -> dict[str, float]:
    before = {name: cpu_seconds(pid) for name, pid in pids.items()}
    client_before = time.process_time()
    start = time.perf_counter()
    streams = uvloop.run(run_clients(port, concurrency, num_requests))
    wall = time.perf_counter() - start
    num_tokens = sum(stream.num_tokens for stream in streams)
    assert num_tokens == num_requests * NUM_OUT
    cpu = {name: cpu_seconds(pid) - before[name] for name, pid in pids.items()}
    cpu["client"] = time.process_time() - client_before
    return {
        "tokens_per_s": num_tokens / wall,
        "tpot_ms": 1e3 * statistics.median(stream.tpot_s for stream in streams),
        "ttft_p50_ms": 1e3 * statistics.median(stream.ttft_s for stream in streams),
        **{f"{name}_cpu_us_per_token": 1e6 * seconds / num_tokens for name, seconds in cpu.items()},
    }


def cpu_seconds(pid: int) -> float:
    """CPU time of a process, all its threads."""
    total_ns = 0
    for thread in os.listdir(f"/proc/{pid}/task"):
        with open(f"/proc/{pid}/task/{thread}/schedstat") as file:
            total_ns += int(file.read().split()[0])
    return 1e-9 * total_ns


def start_server(model: str, flags: list[str], quire: str | None = None) -> tuple[subprocess.Popen[str], int, int]:
    """The server, its port, and the process id of its engine core. `quire`: another tree's program."""
    # From its own tree: `python -m` and children of old trees take modules from the current directory.
    start, folder = ([quire], str(Path(quire).parent)) if quire else ([sys.executable, "-m", "quire"], None)
    command = [*start, "serve", model, "--port", "0", "--disable-access-log", "--speculative-config", "off", *flags]
    server = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert server.stdout is not None
    log = ""
    for line in server.stdout:
        log += line
        found = re.search(r"listening on http://127.0.0.1:(\d+)", line)
        if found:
            children = []
            for task in os.listdir(f"/proc/{server.pid}/task"):
                with open(f"/proc/{server.pid}/task/{task}/children") as file:
                    children += file.read().split()
            return server, int(found[1]), int(children[0])
    raise SystemExit(f"the server did not start:\n{log}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="directory of a checkpoint; default: written into a temporary one")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--requests", type=int, default=512, help="at most; 32 for each stream at a time")
    args, flags = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as directory:
        model = args.model
        if model is None:
            from benchmarks.checkpoints import train_tokenizer, write_checkpoint

            write_checkpoint("llama-tiny", Path(directory), train_tokenizer())
            model = directory
        server, port, core_pid = start_server(model, flags)
        try:
            pids = {"front_end": server.pid, "core": core_pid}
            results = {}
            for concurrency in args.concurrency:
                measure(port, pids, concurrency, 2 * concurrency)  # warm-up
                results[concurrency] = measure(port, pids, concurrency, min(args.requests, 32 * concurrency))
                figures = {name: round(value, 2) for name, value in results[concurrency].items()}
                print(f"{concurrency} streams at a time: {figures}", flush=True)
        finally:
            server.terminate()
            server.communicate()
    print(json.dumps({str(concurrency): result for concurrency, result in results.items()}))


if __name__ == "__main__":
    main()
