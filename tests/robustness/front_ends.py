"""`make test-front-ends`: front ends are killed one by one under load; ROUNDS=30.

Before an engine that costs nothing (`tests.scripted`), streams of two tenants run at two front ends; in each round one
of these is killed. Only its own connections may break. At no moment run more requests of a tenant than `max_concurrent`
allows, and no place is lost when all have ended; as many requests are let in as a bucket holds, no more and no less.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.robustness.http_streams import Exchange, ask
from tests.robustness.server_process import (
    ServerProcess,
    front_ends_of,
    server_of_connections,
    wait_until,
)
from tests.scripted.executor import scripted_environment

RED, BLUE = "red-key-123456", "blue-key-123456"
MAX_CONCURRENT, PER_MINUTE = 6, 600
MARGIN = 8
KEYS = f"""
tenants:
  red: {{keys: [{RED}], max_concurrent: {MAX_CONCURRENT}, operator: true}}
  blue: {{keys: [{BLUE}], requests_per_minute: {PER_MINUTE}}}
"""
STREAM = {"model": "leaf", "prompt": "Once", "max_tokens": 60, "ignore_eos": True, "stream": True}


class Load:
    """Clients that send one request after another.

    Attributes:
        spans: from when to when red streams were surely running.
        counts: of what became of requests.
        wrong: what must not be.
    """

    def __init__(self, server: ServerProcess) -> None:
        self._server = server
        self._is_over = False
        self._killed: dict[int, float] = {}
        self._served: dict[int, int] = {}  # client's port -> front end
        self.spans: list[tuple[float, float]] = []
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []

    async def run(self, rounds: int, rng: random.Random) -> None:
        """Kill so many."""
        red = [asyncio.create_task(self._client(RED)) for _ in range(MAX_CONCURRENT + 4)]
        blue = [asyncio.create_task(self._client(BLUE)) for _ in range(4)]
        for _ in range(rounds):
            await asyncio.sleep(0.2 + 0.3 * rng.random())
            fronts = front_ends_of(self._server.pid)
            self._served.update(server_of_connections(self._server.port, fronts))
            victim = rng.choice(fronts)
            self._killed[victim] = time.monotonic()
            os.kill(victim, signal.SIGKILL)
            num_back = self._server.log.count("serves again")
            await asyncio.to_thread(
                wait_until, lambda before=num_back: self._server.log.count("serves again") > before, "it is replaced"
            )
        self._is_over = True
        await asyncio.gather(*red, *blue)

    async def _client(self, key: str) -> None:
        while not self._is_over:
            exchange = await ask(self._server.port, "/v1/completions", STREAM, key=key)
            if key == RED and len(exchange.pieces) > MARGIN:  # the last ones may be read late
                self.spans.append((exchange.pieces[0][0], exchange.pieces[-MARGIN][0]))
            self._note(exchange)
            await asyncio.sleep(0.01)

    @property
    def most_at_once(self) -> int:
        """Red streams that ran at the same time."""
        changes = sorted([(start, 1) for start, _ in self.spans] + [(end, -1) for _, end in self.spans])
        return max(itertools.accumulate(change for _, change in changes), default=0)

    def _note(self, exchange: Exchange) -> None:
        if exchange.is_whole:
            self.counts["whole"] += 1
        elif exchange.status == 429:
            self.counts["refused"] += 1
        elif self._may_break(exchange):
            self.counts["broken with their front end"] += 1
        else:
            self.wrong.append(f"a stream of status {exchange.status} broke, of a front end that was not killed")

    def _may_break(self, exchange: Exchange) -> bool:
        """Whether the connection was one of a front end that was killed."""
        served = self._served.get(exchange.local_port)
        if served is not None:
            return served in self._killed
        return any(exchange.sent_s <= at + 0.05 for at in self._killed.values())  # it was too new to be looked up


async def places_are_all_there(server: ServerProcess, wrong: list[str]) -> None:
    """Exactly as many run as may, with nothing else under way."""
    while (await ask(server.port, "/load", key=RED)).body != b'{"server_load":0}':
        await asyncio.sleep(0.02)
    exchanges = [Exchange() for _ in range(MAX_CONCURRENT + 3)]
    body = {**STREAM, "max_tokens": 400}
    asked = [asyncio.create_task(ask(server.port, "/v1/completions", body, one, RED)) for one in exchanges]
    await asyncio.gather(*asked)
    statuses = Counter(one.status for one in exchanges)
    if statuses != Counter({200: MAX_CONCURRENT, 429: 3}):
        wrong.append(f"{MAX_CONCURRENT} requests may run, and of {len(exchanges)} these were let in: {statuses}")


async def bucket_is_exact(server: ServerProcess, wrong: list[str]) -> int:
    """Empty a tenant's bucket from many connections at once; what was let in is what it had and got meanwhile."""
    body = {"model": "leaf", "prompt": "Once", "max_tokens": 1}
    first = await ask(server.port, "/v1/completions", body, key=BLUE)
    start_s, left = time.monotonic(), int(first.headers["x-ratelimit-remaining-requests"])
    num_admitted = 0
    while True:
        answers = await asyncio.gather(*(ask(server.port, "/v1/completions", body, key=BLUE) for _ in range(50)))
        statuses = Counter(one.status for one in answers)
        num_admitted += statuses[200]
        if statuses[429]:
            break
    most = left + (time.monotonic() - start_s) * PER_MINUTE / 60 + 1
    if not left <= num_admitted <= most:
        wrong.append(f"{num_admitted} requests were let in; {left} to {most:.1f} may be")
    return num_admitted


async def play(server: ServerProcess, rounds: int, seed: int) -> Load:
    """All of it."""
    load = Load(server)
    await load.run(rounds, random.Random(seed))
    if load.most_at_once > MAX_CONCURRENT:
        load.wrong.append(f"{load.most_at_once} requests of one tenant ran at once")
    load.counts["of one tenant at most at once"] = load.most_at_once
    await places_are_all_there(server, load.wrong)
    load.counts["emptying a bucket"] = await bucket_is_exact(server, load.wrong)
    return load


def main() -> int:
    """Exit code 0 when nothing was wrong."""
    parser = argparse.ArgumentParser(prog="make test-front-ends")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        keys = Path(directory) / "keys.yaml"
        keys.write_text(KEYS)
        keys.chmod(0o600)
        environment = scripted_environment(Path(directory), 5.0)
        flags = ("--distributed-executor-backend", "scripted", "--api-server-count", "2", "--api-key-file", str(keys))
        with ServerProcess(*flags, "--disable-access-log", environment=environment) as server:
            load = asyncio.run(play(server, arguments.rounds, arguments.seed))
            load.wrong += [line for line in server.log.splitlines() if line.startswith("Traceback")]
    for line in load.wrong:
        print(f"wrong: {line}")
    counts = ", ".join(f"{count} {name}" for name, count in load.counts.items())
    print(f"front ends: {arguments.rounds} killed; requests: {counts}; {len(load.wrong)} wrong")
    return int(bool(load.wrong))


if __name__ == "__main__":
    sys.exit(main())
