"""What streaming through the whole HTTP layer costs, against a bare asyncio program that writes the same bytes.

Both serve the same client, one after the other, each on one event loop in a child process: N streams, one event a step
and stream. The bare program writes prepared bytes to its sockets; the server has an engine by rule, which puts one
output a step into every stream, as the engine core's messages do. Printed of each: CPU microseconds of its process per
token, requests included, and how late its event loop ran a timer, from the first request to the end. CPU time is
what is compared, so that a busy machine does not matter. The last line is one figure: the bare program's CPU time by
the server's.

    python -m benchmarks.server.bench_sse --streams 256 --tokens 400
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import uvloop

from quire.config.server import ServerConfig
from quire.core.outputs import CompletionOutput, RequestOutput
from quire.core.stats import RequestStateStats
from quire.engine.output_stream import OutputStream
from quire.server.launcher import make_server
from tests.server.engines import ScriptedEngine

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
BODY = json.dumps({"prompt": [5, 6, 7], "stream": True, "max_tokens": 2000}).encode()
LAG_INTERVAL_S = 0.002
STARTS_S = 0.2  # until every response has begun after its first token: later tokens would be merged with it


def event(text: str) -> bytes:
    content = {
        "id": "cmpl-" + "0" * 32, "object": "text_completion", "created": 1700000000, "model": "leaf",
        "system_fingerprint": "quire-0.1.0-00000000",
        "choices": [{"index": 0, "text": text, "logprobs": None, "finish_reason": None, "stop_reason": None}],
    }  # fmt: skip
    return b"data: " + json.dumps(content, separators=(",", ":")).encode() + b"\n\n"


class LagMeter:
    """How late timers run on an event loop, by the clock and by the process's CPU time; `report` prints it."""

    def __init__(self) -> None:
        self._lags_s: list[float] = []
        self._cpu_lags_s: list[float] = []
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin; harmless when repeated."""
        if self._task is None:
            self._task = asyncio.ensure_future(self._run())

    def report(self) -> None:
        """End, and print milliseconds as JSON."""
        assert self._task is not None
        self._task.cancel()
        figures = {}
        for name, values in (("lag", sorted(self._lags_s)), ("cpu_lag", sorted(self._cpu_lags_s))):
            for share, shown in ((0.5, "p50"), (0.99, "p99"), (1.0, "max")):
                figures[f"{name}_{shown}_ms"] = 1e3 * values[int(share * (len(values) - 1))]
        print(json.dumps(figures), flush=True)

    async def _run(self) -> None:
        while True:
            start, cpu_start = time.monotonic(), time.process_time()
            await asyncio.sleep(LAG_INTERVAL_S)
            self._lags_s.append(max(0.0, time.monotonic() - start - LAG_INTERVAL_S))
            self._cpu_lags_s.append(max(0.0, time.process_time() - cpu_start - LAG_INTERVAL_S))


async def serve_bare(listener: socket.socket, num_tokens: int, num_streams: int) -> None:
    """The ceiling: one write a step and stream, nothing computed."""
    data = event(" word")
    chunk = b"%x\r\n%s\r\n" % (len(data), data)
    waiting: list[asyncio.StreamWriter] = []
    full = asyncio.Event()
    lag = LagMeter()
    num_left = num_streams

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_left
        lag.start()
        await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(len(BODY))
        writer.write(HEAD)
        waiting.append(writer)
        if len(waiting) == num_streams:
            full.set()
        await full.wait()
        for _ in range(num_tokens):
            writer.write(chunk)
            await asyncio.sleep(0)
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        writer.close()
        num_left -= 1
        if not num_left:
            lag.report()

    server = await asyncio.start_server(answer, sock=listener, backlog=1024)
    print("ready", flush=True)
    async with server:
        await server.serve_forever()


class RuleEngine(ScriptedEngine):
    """Puts one output a step into each of `num_streams` streams, once all of them are there."""

    def begin(self, num_tokens: int, num_streams: int, on_end: Callable[[], None]) -> None:
        """Say what to do."""
        self.num_tokens, self.num_streams, self.on_end = num_tokens, num_streams, on_end
        self.streams: dict[str, OutputStream] = {}
        self.lag = LagMeter()

    async def open_stream(self, prompt: Any, params: Any, request_id: str, **_: Any) -> OutputStream:
        """As `EngineClient.open_stream`."""
        self.lag.start()
        stream = self.streams[request_id] = OutputStream(is_delta=True)
        if len(self.streams) == self.num_streams:
            self.stepping = asyncio.ensure_future(self._run())
        return stream

    async def _run(self) -> None:
        for position in range(self.num_tokens):
            await asyncio.sleep(0 if position != 1 else STARTS_S)
            finished = position == self.num_tokens - 1
            reason = "length" if finished else None
            stats = RequestStateStats(first_token_ts=1.0, last_token_ts=1.0 + 1e-3 * position)
            for request_id, stream in self.streams.items():
                answer = CompletionOutput(0, " word", [7], finish_reason=reason)
                stream.put(RequestOutput(request_id, None, [5, 6, 7], [answer], finished, metrics=stats))
        self.on_end()


async def serve_whole(listener: socket.socket, num_tokens: int, num_streams: int) -> None:
    """The HTTP layer around an engine by rule."""
    engine = RuleEngine()
    engine.begin(num_tokens, num_streams, on_end=lambda: engine.lag.report())
    server = make_server(engine, ServerConfig())
    server.on_started = lambda address: print("ready", flush=True)
    await server.serve(sockets=[listener])


async def read_all(port: int, num_streams: int) -> int:
    """Bytes that `num_streams` clients read until their streams end."""

    async def read() -> int:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n")
        writer.write(b"content-length: %d\r\n\r\n%s" % (len(BODY), BODY))
        size, last = 0, b""
        while True:
            data = await reader.read(1 << 16)
            size += len(data)
            last = (last + data)[-16:]
            if not data or last.endswith(b"0\r\n\r\n"):
                writer.close()
                return size

    return sum(await asyncio.gather(*(read() for _ in range(num_streams))))


def measure(kind: str, args: argparse.Namespace) -> dict[str, float]:
    """Run a server in a child process; its CPU time for the streams, start excluded."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(1024)
    command = [sys.executable, "-m", "benchmarks.server.bench_sse", "--serve", kind, "--fd", str(listener.fileno())]
    command += ["--streams", str(args.streams), "--tokens", str(args.tokens)]
    child = subprocess.Popen(command, pass_fds=[listener.fileno()], stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    try:
        before = cpu_seconds(child.pid)
        start = time.perf_counter()
        num_bytes = uvloop.run(read_all(listener.getsockname()[1], args.streams))
        wall = time.perf_counter() - start
        cpu = cpu_seconds(child.pid) - before
        lags = json.loads(child.stdout.readline())
    finally:
        child.kill()
        child.wait()
    tokens = args.streams * args.tokens
    return {
        "cpu_us_per_token": 1e6 * cpu / tokens,
        "tokens_per_s": tokens / wall,
        "bytes_per_token": num_bytes / tokens,
        **lags,
    }


def cpu_seconds(pid: int) -> float:
    """CPU time of a process, all its threads."""
    total_ns = 0
    for thread in os.listdir(f"/proc/{pid}/task"):
        with open(f"/proc/{pid}/task/{thread}/schedstat") as file:
            total_ns += int(file.read().split()[0])
    return 1e-9 * total_ns


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=400, help="of each stream")
    parser.add_argument("--serve", choices=("bare", "whole"), help=argparse.SUPPRESS)
    parser.add_argument("--fd", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve = serve_bare if args.serve == "bare" else serve_whole
        uvloop.run(serve(socket.socket(fileno=args.fd), args.tokens, args.streams))
        return
    result = {kind: measure(kind, args) for kind in ("bare", "whole")}
    for kind, figures in result.items():
        print(kind, {name: round(value, 2) for name, value in figures.items()})
    share = result["bare"]["cpu_us_per_token"] / result["whole"]["cpu_us_per_token"]
    print(f"share of bare: {share:.3f}")


if __name__ == "__main__":
    main()
