"""`make test-redis`: engines over a Redis (or Valkey) server that is killed, hangs, is full and damages what it keeps.

Run by a Python that has the package redis; REDIS_SERVER names the server's program. Every answer is compared with that
of an engine without a connector, tokens and log-probabilities byte by byte. The last line says how many were wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.robustness.lmcache import NUM_TOKENS, Check, Engine
from tests.robustness.router import free_port

BLOCK_SIZE = 16
PATIENCE_S = 30.0
PAUSE_S = 5.5
"""Longer than a server that did not answer is left alone."""


class Server:
    """A Redis server in a directory of its own, on a port that stays."""

    def __init__(self, program: str, directory: Path) -> None:
        self.port = free_port()
        self._command = [
            program, "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no",
            "--dir", str(directory), "--enable-debug-command", "no",
        ]  # fmt: skip
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *flags: str) -> Any:
        """Start it, with nothing in it; a client of it."""
        import redis

        self._process = subprocess.Popen([*self._command, *flags], stdout=subprocess.DEVNULL)
        client, deadline = redis.Redis(port=self.port), time.monotonic() + PATIENCE_S
        while True:
            try:
                client.ping()
                return client
            except redis.ConnectionError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)

    def send(self, number: int) -> None:
        """Send it a signal."""
        assert self._process is not None
        self._process.send_signal(number)
        if number == signal.SIGKILL:
            self._process.wait()
            self._process = None

    def close(self) -> None:
        if self._process is not None:
            self.send(signal.SIGKILL)


@contextlib.contextmanager
def serving(program: str) -> Iterator[Server]:
    """A server that is gone at the end."""
    with tempfile.TemporaryDirectory() as directory:
        server = Server(program, Path(directory))
        try:
            yield server
        finally:
            server.close()


def damage(client: Any) -> int:
    """Flip a byte of every second value, in different places; how many."""
    keys = sorted(client.keys())[::2]
    for number, key in enumerate(keys):
        place = number * 7919 % client.strlen(key)
        byte = client.getrange(key, place, place)
        client.setrange(key, place, bytes([byte[0] ^ 1]))
    return len(keys)


def run(program: str, num_prompts: int, seed: int) -> int:
    """Number of answers that were wrong or lost, and of blocks that should have been loaded and were not."""
    rng = random.Random(seed)
    shared = [rng.randrange(5, 900) for _ in range(64)]
    check = Check([shared + [rng.randrange(5, 900) for _ in range(NUM_TOKENS - 64)] for _ in range(num_prompts)])
    least = num_prompts * (NUM_TOKENS // BLOCK_SIZE)
    problems = 0
    with serving(program) as server:
        client = server.start()
        version = client.info("server").get("valkey_version") or client.info("server")["redis_version"]
        extra = {"url": f"redis://127.0.0.1:{server.port}/0", "timeout_s": 0.5}
        transfer = {"kv_connector": "RedisConnector", "kv_connector_extra_config": extra}
        first, second = Engine(transfer), Engine(transfer)
        check.ask(first, "saved")
        check.ask(second, "loaded by a second engine")
        problems += second.counts["loaded_blocks"] < least
        num_damaged = damage(client)
        check.ask(second, f"{num_damaged} blocks damaged")
        problems += second.counts["failed_blocks"] == 0
        check.ask(second, "loaded again, or computed and saved again")
        for what, number in (("hangs", signal.SIGSTOP), ("is killed", signal.SIGKILL)):
            for after in (0, 2):
                check.ask(
                    second, f"the server {what} after {after} steps", after=after, act=lambda n=number: server.send(n)
                )
                check.ask(second, "while it is so")
                if number == signal.SIGKILL:
                    client = server.start()
                server.send(signal.SIGCONT)
                time.sleep(PAUSE_S)
                check.ask(second, "with a server")
        server.send(signal.SIGKILL)
        client = server.start("--maxmemory", str(2 << 20), "--maxmemory-policy", "noeviction")
        time.sleep(PAUSE_S)
        before = second.counts["unsaved_blocks"]
        for what in ("full", "full, again"):
            check.ask(second, what)
        problems += second.counts["unsaved_blocks"] == before
        before = second.counts["loaded_blocks"]
        client.config_set("maxmemory", 0)
        for what in ("with space, saved", "with space, loaded"):
            check.ask(second, what)
        problems += second.counts["loaded_blocks"] < before + least
        for engine in (first, second):
            engine.core.shutdown()
    print(
        f"Redis {version}: {check.num_asked} answers, {second.counts['loaded_blocks']:g} blocks loaded, "
        f"{num_damaged} damaged, a server that hung, died and was full; wrong {check.num_wrong}, lost "
        f"{check.num_lost}, not loaded or counted {problems}"
    )
    return check.num_wrong + check.num_lost + problems


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    program = os.environ.get("REDIS_SERVER") or shutil.which("redis-server") or shutil.which("valkey-server")
    if program is None:
        raise SystemExit("there is no redis-server: make test-redis fetches it; or set REDIS_SERVER")
    raise SystemExit(min(1, run(program, args.prompts, args.seed)))


if __name__ == "__main__":
    main()
