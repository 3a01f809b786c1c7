"""How much of a bare asyncio program's streaming speed is left with the whole HTTP layer around an engine by rule.

Both serve the same bytes to the same client, one after the other, on one event loop each in a child process: N streams,
one event a step and stream. The ceiling writes prepared bytes to the sockets. CPU seconds of the server's process are
what is compared, so that a busy machine does not matter. The last line is one JSON object.

    python benchmarks/server/bench_sse.py --streams 256 --tokens 200
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
from collections.abc import AsyncIterator
from typing import Any

import uvloop

from quire.config.server import ServerConfig
from quire.core.outputs import CompletionOutput, RequestOutput
from quire.core.stats import RequestStateStats
from quire.entrypoints.openai.launcher import make_server
from tests.server.engines import ScriptedEngine

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
BODY = json.dumps({"prompt": [5, 6, 7], "stream": True}).encode()


def event(text: str) -> bytes:
    content = {
        "id": "cmpl-" + "0" * 32, "object": "text_completion", "created": 1700000000, "model": "leaf",
        "system_fingerprint": "quire-0.1.0-00000000",
        "choices": [{"index": 0, "text": text, "logprobs": None, "finish_reason": None, "stop_reason": None}],
    }  # fmt: skip
    return b"data: " + json.dumps(content, separators=(",", ":")).encode() + b"\n\n"


async def serve_bare(listener: socket.socket, num_tokens: int, num_streams: int) -> None:
    """The ceiling: one write a step and stream, nothing computed."""
    data = event(" word")
    chunk = b"%x\r\n%s\r\n" % (len(data), data)
    waiting: list[asyncio.StreamWriter] = []
    full = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
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

    server = await asyncio.start_server(answer, sock=listener, backlog=1024)
    print("ready", flush=True)
    async with server:
        await server.serve_forever()


async def serve_whole(listener: socket.socket, num_tokens: int, num_streams: int) -> None:
    """The HTTP layer around an engine that gives each stream one prepared output a turn of the loop."""

    class Prepared(ScriptedEngine):
        arrived = 0
        full = asyncio.Event()

        async def generate(self, prompt: Any, sampling_params: Any, request_id: str, **_: Any) -> AsyncIterator[Any]:
            self.arrived += 1
            if self.arrived == num_streams:
                self.full.set()
            await self.full.wait()
            stats = RequestStateStats(first_token_ts=1.0, last_token_ts=1.0)
            for position in range(num_tokens):
                await asyncio.sleep(0)
                stats.last_token_ts += 1e-3
                finished = position == num_tokens - 1
                answer = CompletionOutput(0, " word", [7], finish_reason="length" if finished else None)
                yield RequestOutput(request_id, None, [5, 6, 7], [answer], finished, metrics=stats)

    server = make_server(Prepared(), ServerConfig())
    server.on_started = lambda address: print("ready", flush=True)
    await server.serve(sockets=[listener])


async def read_all(port: int, num_streams: int) -> int:
    """Bytes that `num_streams` clients read until their streams end."""

    async def read() -> int:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n")
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
    """Run a server in a child process; its CPU seconds for the streams, start excluded."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(1024)
    command = [sys.executable, __file__, "--serve", kind, "--fd", str(listener.fileno())]
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
    finally:
        child.kill()
        child.wait()
    tokens = args.streams * args.tokens
    return {
        "cpu_us_per_token": 1e6 * cpu / tokens,
        "tokens_per_s": tokens / wall,
        "bytes_per_token": num_bytes / tokens,
    }


def cpu_seconds(pid: int) -> float:
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=200)
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
    print(json.dumps({"streams": args.streams, "tokens": args.tokens, "share_of_bare": share, **result}))


if __name__ == "__main__":
    main()
