"""`quire serve` as processes: streams that go on when the engine core dies, and servers that end without a loss.

Small versions of `make soak`, `make soak-kill` and `make rolling`, and what they do not look at.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from tests.robustness import rolling, soak, survive
from tests.robustness.http_streams import Exchange, answer_of, ask, request_bytes
from tests.robustness.server_process import ServerProcess, wait_until

LONG = {"model": "leaf", "prompt": "Once", "max_tokens": 1500, "stream": True, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess("--hang-timeout-s", "1", "--disable-access-log") as server:
        yield server
        assert "Traceback" not in server.log


def test_at_saturation_nothing_is_taken_for_a_hang(server: ServerProcess):
    course = asyncio.run(soak.soak(server, lambda course: course.num_requests < 200, num_clients=48))
    assert not course.wrong
    assert course.num_restarts == 0 and course.num_requests >= 200
    assert course.samples["core files"][-1] == course.samples["core files"][0]


def test_streams_whose_core_is_killed_or_stopped_say_what_they_say_undisturbed(server: ServerProcess):
    async def rounds() -> list[survive.Round]:
        usual = await survive.undisturbed(server, survive.make_requests(12, 40))
        faults = (survive.kill, survive.stop)
        return [await survive.disturbed(server, usual, fault, 0.3, random.Random(1)) for fault in faults]

    for found in asyncio.run(rounds()):
        assert not found.different
        assert found.restarts == 1
        assert found.noticed_s is not None and found.recovered_s is not None
    assert "has not advanced for" in server.log and "it hangs: no progress" in server.log
    pages = [line for line in server.log.splitlines() if "KV cache: " in line]
    assert len(pages) == 3 and len({line.partition("KV cache: ")[2] for line in pages}) == 1


def test_while_the_core_restarts_the_server_is_alive_but_not_ready_and_requests_wait(server: ServerProcess):
    async def look() -> tuple[Exchange, ...]:
        os.kill(server.core_pid, signal.SIGKILL)
        while (ready := await ask(server.port, "/ready")).status == 200:
            await asyncio.sleep(0.002)
        new = asyncio.ensure_future(ask(server.port, "/v1/completions", {**LONG, "max_tokens": 3}))
        health, ping, live = [await ask(server.port, path) for path in ("/health", "/ping", "/live")]
        answer = await new
        while (again := await ask(server.port, "/ready")).status != 200:
            await asyncio.sleep(0.002)
        return ready, health, ping, live, answer, again

    ready, health, ping, live, answer, again = asyncio.run(look())
    for one in (ready, health, ping):
        assert one.status == 503 and one.headers["retry-after"] == "1"
        assert "being restarted" in json.loads(one.body)["error"]["message"]
    assert live.status == again.status == 200
    assert answer_of(answer)


def test_servers_restarted_in_turn_behind_a_proxy_lose_nothing():
    service = asyncio.run(rolling.roll(1, num_clients=6, max_tokens=20, rng=random.Random(0)))
    assert service.is_perfect, service


def test_after_the_deadline_every_stream_has_its_final_event_and_the_process_ends_well():
    async def drain(server: ServerProcess) -> tuple[list[Exchange], bytes]:
        streams = [asyncio.ensure_future(ask(server.port, "/v1/completions", LONG)) for _ in range(3)]
        chat = {**LONG, "messages": [{"role": "user", "content": "Hi"}], "temperature": 1, "n": 2, "seed": 1}
        streams.append(asyncio.ensure_future(ask(server.port, "/v1/chat/completions", chat)))
        streams.append(asyncio.ensure_future(ask(server.port, "/v1/completions", {**LONG, "stream": False})))
        slow = socket.create_connection(("127.0.0.1", server.port))
        slow.sendall(request_bytes("/v1/completions", LONG))
        while not await asyncio.to_thread(slow.recv, 1, socket.MSG_PEEK):
            pass
        server.send(signal.SIGTERM)
        await asyncio.sleep(1.5)  # one that reads nothing until the deadline has passed
        late = await asyncio.to_thread(_read_all, slow)
        return list(await asyncio.gather(*streams)), late

    with ServerProcess("--shutdown-timeout", "1") as server:
        exchanges, late = asyncio.run(drain(server))
        assert server.wait(20) == 0
        log = server.log
    whole = exchanges.pop()
    assert json.loads(whole.body)["choices"][0]["finish_reason"] == "abort"
    for exchange in exchanges:
        choices, _ = answer_of(exchange)
        assert {choice["finish_reason"] for choice in choices.values()} == {"abort"}
    assert late.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n") and b'"finish_reason":"abort"' in late
    assert "deadline: 6 requests end unfinished (finish_reason abort)" in log
    assert "Traceback" not in log and "ERROR" not in log


def _read_all(client: socket.socket) -> bytes:
    parts = []
    with client:
        while part := client.recv(1 << 16):
            parts.append(part)
    return b"".join(parts)


def test_a_server_whose_second_signal_comes_ends_at_once_and_says_how_many_it_ended():
    async def end(server: ServerProcess) -> list[Exchange]:
        streams = [asyncio.ensure_future(ask(server.port, "/v1/completions", LONG)) for _ in range(3)]
        exchanges: list[Any] = streams
        while (await ask(server.port, "/load")).body != b'{"server_load":3}':
            await asyncio.sleep(0.005)
        server.send(signal.SIGTERM)
        await asyncio.to_thread(wait_until, lambda: "draining" in server.log, "it drains")
        server.send(signal.SIGTERM)
        return list(await asyncio.gather(*exchanges))

    with ServerProcess("--shutdown-timeout", "600") as server:
        exchanges = asyncio.run(end(server))
        assert server.wait(20) == 0
        log = server.log
    assert [answer_of(one)[0][0]["finish_reason"] for one in exchanges] == ["abort"] * 3
    assert "ending at once: 3 requests end unfinished" in log
    assert "Traceback" not in log and "ERROR" not in log
