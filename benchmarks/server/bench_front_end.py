"""What a request costs the HTTP server itself: CPU time of its process per request; its engine answers at once.

A server in a process of its own, on loopback, over an engine that has the whole answer as soon as it is asked. A client
of raw sockets in this process sends small chats, streamed and not, prompts of token ids, and model lists, over
connections that are kept. Prints CPU microseconds per request of each kind, the median of `--rounds`. With `--against
DIR`, another checkout, both are measured in turn, round by round, and there are ratios. The last line is one JSON
object.

    python -m benchmarks.server.bench_front_end --against ../quire-before
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

CHAT = {"messages": [{"role": "user", "content": "What is 27 + 58?"}], "max_tokens": 8, "temperature": 0}
KINDS: dict[str, tuple[bytes, bytes, dict[str, Any] | None]] = {
    "chat": (b"POST", b"/v1/chat/completions", CHAT),
    "chat_stream": (b"POST", b"/v1/chat/completions", {**CHAT, "stream": True}),
    "token_ids": (b"POST", b"/v1/completions", {"prompt": list(range(5, 37)), "max_tokens": 8, "temperature": 0}),
    "models": (b"GET", b"/v1/models", None),
}
NUM_CONNECTIONS = 8
HEAD = (
    b"%b %b HTTP/1.1\r\nhost: 127.0.0.1\r\naccept: application/json\r\ncontent-type: application/json\r\n"
    b"user-agent: bench\r\naccept-encoding: identity\r\nconnection: keep-alive\r\ncontent-length: %d\r\n\r\n"
)


def request_of(kind: str) -> bytes:
    """The bytes of one request."""
    method, path, fields = KINDS[kind]
    body = b"" if fields is None else json.dumps(fields).encode()
    return HEAD % (method, path, len(body)) + body


async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes) -> None:
    """Send a request, read the whole response."""
    writer.write(request)
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    assert head.startswith(b"http/1.1 200"), head
    if b"transfer-encoding: chunked" in head:
        await reader.readuntil(b"\r\n0\r\n\r\n")
    else:
        await reader.readexactly(int(head.partition(b"content-length:")[2].split(b"\r\n", 1)[0]))


async def send(port: int, request: bytes, num_requests: int) -> None:
    """`num_requests` requests over a few connections."""

    async def work() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(num_requests // NUM_CONNECTIONS):
            await ask(reader, writer, request)
        writer.close()

    await asyncio.gather(*(work() for _ in range(NUM_CONNECTIONS)))


class Server:
    """The server of one checkout."""

    def __init__(self, tree: Path) -> None:
        own = Path(__file__).resolve()
        its_python = tree / ".venv" / "bin" / "python"  # an editable install of one checkout hides the other
        command = [str(its_python if its_python.exists() else sys.executable), str(own), "--serve", str(tree)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tree)
        assert self._process.stdout is not None
        self._port = int(self._process.stdout.readline())

    def measure(self, kind: str, num_requests: int) -> float:
        """CPU microseconds per request."""
        before = self._cpu_s()
        asyncio.run(send(self._port, request_of(kind), num_requests))
        return 1e6 * (self._cpu_s() - before) / num_requests

    def stop(self) -> None:
        """End it."""
        self._process.terminate()
        self._process.wait(20)

    def _cpu_s(self) -> float:
        total_ns = 0
        for thread in os.listdir(f"/proc/{self._process.pid}/task"):
            with open(f"/proc/{self._process.pid}/task/{thread}/schedstat") as file:
                total_ns += int(file.read().split()[0])
        return 1e-9 * total_ns


def serve(tree: Path) -> None:
    """Serve that checkout over an engine that answers at once; print the port."""
    sys.path[0] = str(tree)
    import socket

    import uvloop

    from quire.core.outputs import CompletionOutput, RequestOutput
    from quire.core.stats import RequestStateStats
    from quire.engine.output_stream import OutputStream
    from tests.server.engines import ScriptedEngine
    from tests.server.servers import server_config

    try:
        from quire.server import launcher
    except ImportError:  # as it lay before the server had a package of its own
        launcher = importlib.import_module("quire.entrypoints.server.launcher")

    class Instant(ScriptedEngine):
        async def open_stream(
            self, prompt: Any, params: Any, request_id: str, options: Any = None, **older: Any
        ) -> OutputStream:
            prepare = self._inputs.prepare  # which has taken the options since there are some
            if options is None:
                prepared = prepare(prompt, params, add_special_tokens=older.get("add_special_tokens", True))
            else:
                prepared = prepare(prompt, params, options)
            now = time.monotonic()
            stats = RequestStateStats(
                arrival_time=time.time(), queued_ts=now, scheduled_ts=now, first_token_ts=now, last_token_ts=now
            )
            stats.num_generation_tokens = 8
            ids = prepared.prompt_token_ids.tolist()
            stream = OutputStream(is_delta=params.output_kind.name == "DELTA")
            answer = CompletionOutput(0, "27 + 58 = 85", list(range(100, 108)), None, None, "stop", None)
            output = RequestOutput(request_id, prepared.prompt, ids, [answer], True, num_cached_tokens=0, metrics=stats)
            stream.put(output)
            return stream

    server = launcher.make_server(Instant(), server_config(port=0, disable_access_log=True))
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    listener.listen()
    uvloop.run(server.serve(sockets=[listener]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--against", type=Path, metavar="DIR", help="another checkout, measured in turn")
    parser.add_argument("--requests", type=int, default=2000, help="of each kind in a round")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--serve", type=Path, metavar="DIR", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve is not None:
        serve(args.serve.resolve())
        return
    trees = {"this": Path(__file__).resolve().parents[2]}
    if args.against is not None:
        trees["other"] = args.against.resolve()
    servers = {name: Server(tree) for name, tree in trees.items()}
    try:
        figures: dict[str, dict[str, list[float]]] = {name: {kind: [] for kind in KINDS} for name in servers}
        for kind in KINDS:
            for server in servers.values():
                server.measure(kind, NUM_CONNECTIONS * 25)  # warm-up
            for _ in range(args.rounds):
                for name, server in servers.items():
                    figures[name][kind].append(server.measure(kind, args.requests))
    finally:
        for server in servers.values():
            server.stop()
    medians = {name: {kind: statistics.median(of[kind]) for kind in KINDS} for name, of in figures.items()}
    for kind in KINDS:
        line = "   ".join(
            f"{name} {medians[name][kind]:6.0f} us ({min(of[kind]):.0f} to {max(of[kind]):.0f})"
            for name, of in figures.items()
        )
        print(f"{kind:12} {line}")
    result: dict[str, Any] = {"cpu_us_per_request": medians["this"]}
    if "other" in medians:
        result["ratio"] = {kind: round(medians["this"][kind] / medians["other"][kind], 3) for kind in KINDS}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
