"""`make test-lmcache`: engines over LMCache's server as it is: save, evict, load, and the server killed mid-way.

Run by a Python that has LMCache. Every answer is compared with that of an engine without a connector, tokens and
log-probabilities byte by byte. The last line says how many were wrong or lost.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.robustness.connector_answers import (
    NUM_SHARED,
    NUM_TOKENS,
    PATIENCE_S,
    Check,
    Engine,
    missing,
    random_prompts,
)

CHUNK_SIZE = 32


class Server:
    """`lmcache server`, which may be killed and started again on its port."""

    def __init__(self, directory: Path, l1_gb: float) -> None:
        self.port, self._http_port = _free_port(), _free_port()
        self._log, self._l1_gb = directory / "server.log", l1_gb
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [
            str(Path(sys.prefix) / "bin" / "lmcache"), "server", "--host", "127.0.0.1", "--port", str(self.port),
            "--http-host", "127.0.0.1", "--http-port", str(self._http_port), "--chunk-size", str(CHUNK_SIZE),
            "--l1-size-gb", str(self._l1_gb), "--eviction-policy", "LRU",
        ]  # fmt: skip
        environment = {**os.environ, "LMCACHE_TRACK_USAGE": "false", "LMCACHE_DISABLE_BANNER": "1"}
        with self._log.open("ab") as log:
            size = log.tell()
            self._process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        deadline = time.monotonic() + PATIENCE_S
        while b"Uvicorn running" not in self._log.read_bytes()[size:]:
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"lmcache server did not start:\n{self._log.read_text()[-2000:]}")
            time.sleep(0.1)

    def kill(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
            self._process = None


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


@contextlib.contextmanager
def serving(l1_gb: float) -> Iterator[Server]:
    """A server that is gone at the end."""
    with tempfile.TemporaryDirectory() as directory:
        server = Server(Path(directory), l1_gb)
        server.start()
        try:
            yield server
        finally:
            server.kill()


def run(num_prompts: int, seed: int) -> int:
    """Number of answers that were wrong or lost, and of things that should have been counted."""
    rng = random.Random(seed)
    check = Check(random_prompts(num_prompts, rng))
    problems = 0
    least = num_prompts * ((NUM_TOKENS - NUM_SHARED) // CHUNK_SIZE) * 2  # siblings share what one of them has loaded
    with serving(l1_gb=0.25) as server:
        extra = {
            "lmcache.mp.host": "127.0.0.1", "lmcache.mp.port": server.port, "lmcache.mp.mq_timeout": 2.0,
            "lmcache.mp.heartbeat_interval": 0.5,
        }  # fmt: skip
        transfer = {"kv_connector": "LMCacheMPConnector", "kv_connector_extra_config": extra}
        first = Engine(transfer)
        check.ask(first, "saved")
        check.ask(first, "evicted from the engine, loaded")
        problems += missing(first, "loaded_blocks", least)
        second = Engine(transfer)
        check.ask(second, "loaded by a second engine")
        problems += missing(second, "loaded_blocks", least)
        second.core.shutdown()
        for after in (0, 1, 3, 8):
            check.ask(first, f"server killed after {after} steps", after=after, act=server.kill)
            check.ask(first, "without a server")
            server.start()
            deadline, before = time.monotonic() + PATIENCE_S, first.counts["loaded_blocks"]
            while first.counts["loaded_blocks"] == before and time.monotonic() < deadline:
                check.ask(first, "with a new server")
        problems += missing(first, "lmcache_failed_loads", 1) + missing(first, "lmcache_failed_saves", 1)
        first.core.shutdown()
    version = importlib.metadata.version("lmcache")
    print(
        f"LMCache {version}: {check.num_asked} answers, {first.counts['loaded_blocks']:g} blocks loaded, 4 servers "
        f"killed; wrong {check.num_wrong}, lost {check.num_lost}, not counted {problems}"
    )
    return check.num_wrong + check.num_lost + problems


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    raise SystemExit(min(1, run(args.prompts, args.seed)))


if __name__ == "__main__":
    main()
