"""The application of Ray Serve under the real Ray Serve: answers through its proxy are those of a server.

`make test-ray-serve`. A cluster of this machine alone, started and ended by `serve run`. Requests with and without a
stream, at once; an engine core is killed while streams run. The last line is the number of answers that differ.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.robustness.http_streams import Exchange, answer_of, ask
from tests.robustness.server_process import ROOT, ServerProcess

START_TIMEOUT_S = 400.0
NUM_TOKENS = 150
PATIENCE = {"RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "120", "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "120"}
"""Serve gives up a proxy that is not ready within 5 seconds, which a busy machine needs longer for."""


class RayServe:
    """`serve run` with leaf on a free port; `close` leaves none of its processes."""

    def __init__(self) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="qs")
        root = Path(self._directory.name)
        with socket.create_server(("127.0.0.1", 0)) as taken:
            self.port = taken.getsockname()[1]
        application = {
            "name": "quire", "route_prefix": "/", "import_path": "quire.entrypoints.ray_serve:build",
            "args": {"model": "leaf", "num_threads": 1},
        }  # fmt: skip
        http = {"host": "127.0.0.1", "port": self.port}
        config = root / "serve.yaml"  # JSON is YAML
        config.write_text(json.dumps({"http_options": http, "applications": [application]}))
        self._log = root / "log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [str(Path(sys.executable).parent / "serve"), "run", str(config)], cwd=ROOT, stdin=subprocess.DEVNULL,
                stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
                env={**os.environ, "RAY_TMPDIR": str(root), "RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": str(ROOT),
                     "HOME": str(root), **PATIENCE},
            )  # fmt: skip

    async def wait_ready(self) -> None:
        """Until the application answers."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while (await ask(self.port, "/v1/models")).status != 200:
            if time.monotonic() > deadline or self._process.poll() is not None:
                raise SystemExit(f"Ray Serve did not start:\n{self._log.read_text(errors='replace')[-4000:]}")
            await asyncio.sleep(0.5)

    def core_pids(self) -> list[int]:
        """Engine cores of the replicas: of processes that have this cluster's directory in their environment."""
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                is_core = b"core_proc" in (process / "cmdline").read_bytes()
                if is_core and self._directory.name.encode() in (process / "environ").read_bytes():
                    found.append(int(process.name))
        return found

    def close(self) -> None:
        """End everything: Ray's processes end with the one that started them."""
        self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._directory.cleanup()


def completion(number: int, **others: Any) -> dict[str, Any]:
    kinds: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 0.8, "seed": 3},
                                   {"temperature": 1, "seed": 4, "top_p": 0.9}]  # fmt: skip
    return {
        "model": "leaf", "prompt": f"Story {number}: once upon a time there was", "logprobs": 1, "ignore_eos": True,
        "max_tokens": NUM_TOKENS, **kinds[number % len(kinds)], **others,
    }  # fmt: skip


def requests() -> list[tuple[str, dict[str, Any]]]:
    """Paths and bodies: with and without a stream, completions and chat."""
    chat = {"model": "leaf", "messages": [{"role": "user", "content": "What is 17 plus 25?"}], "temperature": 0}
    return [
        *(("/v1/completions", completion(number, stream=number % 2 == 0)) for number in range(6)),
        ("/v1/chat/completions", {**chat, "stream": True}), ("/v1/chat/completions", chat),
    ]  # fmt: skip


def said(exchange: Exchange, is_stream: bool) -> Any:
    """What came, without what differs from one request to the other."""
    if exchange.status != 200 or (is_stream and not exchange.is_whole):
        return f"status {exchange.status}: {exchange.body[-200:]!r}"
    if is_stream:
        return answer_of(exchange)
    body = json.loads(exchange.body)
    return [[{**choice} for choice in body["choices"]], body["usage"]["completion_tokens"]]


async def answers(port: int, asked: list[tuple[str, dict[str, Any]]]) -> list[Any]:
    """Of requests at once."""
    found = await asyncio.gather(*(ask(port, path, body) for path, body in asked))
    return [said(one, bool(body.get("stream"))) for one, (_, body) in zip(found, asked, strict=True)]


async def under_kill(serve: RayServe, asked: list[tuple[str, dict[str, Any]]]) -> list[Any]:
    """Of streams during which the engine core is killed."""
    exchanges = [Exchange() for _ in asked]
    asking = [
        asyncio.ensure_future(ask(serve.port, path, body, one))
        for (path, body), one in zip(asked, exchanges, strict=True)
    ]
    while not all(len(one.pieces) > 3 or task.done() for one, task in zip(exchanges, asking, strict=True)):
        await asyncio.sleep(0.02)
    pids = serve.core_pids()
    if not pids:
        raise SystemExit("no engine core of a replica was found, so none was killed")
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    await asyncio.gather(*asking)
    return [said(one, is_stream=True) for one in exchanges]


async def compare(port: int, serve: RayServe) -> int:
    asked = requests()
    streams = [(path, body) for path, body in asked if body.get("stream") and "prompt" in body]
    expected, of_streams = await answers(port, asked), await answers(port, streams)
    await serve.wait_ready()
    differing = 0
    for name, wanted, found in (
        ("with and without a stream", expected, await answers(serve.port, asked)),
        ("streams, the engine core killed", of_streams, await under_kill(serve, streams)),
    ):
        wrong = sum(one != other for one, other in zip(wanted, found, strict=True))
        print(f"{name}: {len(found) - wrong} of {len(found)} answers are those of a server", flush=True)
        differing += wrong
        if wrong:
            print([one for one, other in zip(found, wanted, strict=True) if one != other], file=sys.stderr)
    return differing


def main() -> None:
    """Both, and what differs."""
    serve = RayServe()
    try:
        with ServerProcess() as alone:
            differing = asyncio.run(compare(alone.port, serve))
    finally:
        serve.close()
    print(f"{differing} answers differ")
    sys.exit(bool(differing))


if __name__ == "__main__":
    main()
