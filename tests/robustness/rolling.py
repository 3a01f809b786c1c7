"""`make rolling`: two servers behind a plain TCP proxy, restarted in turn by SIGTERM under load; nothing may be lost.

The proxy knows no HTTP: it passes bytes to the next server that lets it connect. Clients open streams all the time; one
that is told 503 with Retry-After comes again. RESTARTS=6 by default.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import random
import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from tests.robustness.http_streams import answer_of, ask
from tests.robustness.server_process import ServerProcess
from tests.robustness.survive import Request, make_requests, undisturbed

FLAGS = ("--disable-access-log", "--shutdown-timeout", "60", "--num-gpu-blocks-override", "1000")
CONNECT_TRIES = 200


class TcpProxy:
    """Passes connections on, in turn, to backends that accept them.

    Attributes:
        backends: their ports; may be changed at any time.
        port: where it listens.
    """

    def __init__(self, backends: list[int]) -> None:
        self.backends = backends
        self.port = 0
        self._turn = itertools.count()
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> TcpProxy:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0, backlog=512)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        await asyncio.gather(*self._tasks)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner_writer = await self._connect()
        try:
            await asyncio.gather(_copy(reader, inner_writer), _copy(inner_reader, writer))
        finally:
            for one in (writer, inner_writer):
                one.close()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        for _ in range(CONNECT_TRIES):
            port = self.backends[next(self._turn) % len(self.backends)]
            with suppress(ConnectionRefusedError, ConnectionResetError):
                return await asyncio.open_connection("127.0.0.1", port)
            await asyncio.sleep(0.01)
        raise AssertionError("no backend accepts connections")


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """All bytes from one end to the other, then its end."""
    try:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()
    except OSError:
        writer.close()


@dataclass
class Service:
    """What clients saw."""

    num_whole: int = 0
    num_told_to_come_again: int = 0
    truncated: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    different: list[str] = field(default_factory=list)
    exit_codes: list[int] = field(default_factory=list)
    tracebacks: list[str] = field(default_factory=list)

    @property
    def is_perfect(self) -> bool:
        """True when nothing was lost and every server ended well."""
        wrong = (self.truncated, self.failed, self.different, self.tracebacks)
        return not any(wrong) and not any(self.exit_codes) and self.num_whole > 0


async def roll(num_restarts: int, num_clients: int, max_tokens: int, rng: random.Random) -> Service:
    """Restart servers in turn under the load of `num_clients`."""
    service = Service()
    requests = make_requests(12, max_tokens)
    servers = await asyncio.gather(*(asyncio.to_thread(ServerProcess, *FLAGS) for _ in range(2)))
    try:
        expected = (await undisturbed(servers[0], requests)).answers
        is_over = asyncio.Event()
        async with TcpProxy([server.port for server in servers]) as proxy:
            clients = [
                asyncio.ensure_future(_client(proxy.port, requests, expected, service, is_over, random.Random(i)))
                for i in range(num_clients)
            ]
            for number in range(num_restarts):
                await asyncio.sleep(0.5 + rng.random())
                place = number % 2
                await _restart(servers, place, service)
                proxy.backends[place] = servers[place].port
                print(f"restart {number + 1}: {service.num_whole} streams whole, {service.num_told_to_come_again} told "
                      f"to come again, {len(service.truncated)} truncated, {len(service.failed)} failed, "
                      f"load {os.getloadavg()[0]:.1f}", flush=True)  # fmt: skip
            await asyncio.sleep(0.5)
            is_over.set()
            await asyncio.gather(*clients)
    finally:
        for server in servers:
            server.stop()
    return service


async def _restart(servers: list[ServerProcess], place: int, service: Service) -> None:
    old = servers[place]
    old.send(signal.SIGTERM)
    service.exit_codes.append(await asyncio.to_thread(old.wait, 120))
    service.tracebacks += [line for line in old.log.splitlines() if line.startswith(("Traceback", "ERROR"))]
    old.stop()
    servers[place] = await asyncio.to_thread(ServerProcess, *FLAGS)


async def _client(
    port: int,
    requests: list[Request],
    expected: list[Any],
    service: Service,
    is_over: asyncio.Event,
    rng: random.Random,
) -> None:
    while not is_over.is_set():
        i = rng.randrange(len(requests))
        exchange = await ask(port, *requests[i])
        retry_after = exchange.headers.get("retry-after")
        if exchange.status == 503 and retry_after is not None:
            service.num_told_to_come_again += 1
            await asyncio.sleep(rng.random() * int(retry_after))
        elif exchange.status != 200:
            service.failed.append(f"request {i}: status {exchange.status}, {exchange.body[-200:]!r}")
        elif not exchange.is_whole:
            service.truncated.append(f"request {i} ends with {exchange.body[-200:]!r}")
        elif answer_of(exchange) != expected[i]:
            service.different.append(f"request {i} ends with {exchange.body[-300:]!r}")
        else:
            service.num_whole += 1


def main() -> int:
    """Exit code 0 when no stream was truncated and no request failed."""
    parser = argparse.ArgumentParser(prog="make rolling")
    parser.add_argument("--restarts", type=int, default=6)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    start = time.monotonic()
    service = asyncio.run(roll(arguments.restarts, arguments.clients, 60, random.Random(arguments.seed)))
    for line in [*service.truncated, *service.failed, *service.different, *service.tracebacks]:
        print(line)
    print(f"rolling: {len(service.exit_codes)} restarts, {service.num_whole} streams whole, {len(service.truncated)} "
          f"truncated, {len(service.failed)} failed, {len(service.different)} different, "
          f"{service.num_told_to_come_again} told to come again, {time.monotonic() - start:.0f} s")  # fmt: skip
    return 0 if service.is_perfect else 1


if __name__ == "__main__":
    sys.exit(main())
