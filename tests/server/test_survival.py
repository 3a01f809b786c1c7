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

import pytest

from tests.effort import effort
from tests.robustness import rolling, soak, survive
from tests.robustness.http_streams import Exchange, answer_of, ask, request_bytes
from tests.robustness.server_process import ServerProcess, wait_until

LONG = {"model": "leaf", "prompt": "Once", "max_tokens": 1500, "stream": True, "ignore_eos": True, "temperature": 0}
NUM_REQUESTS = effort(72, 120)


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    flags = ("--hang-timeout-s", "1", "--disable-access-log", "--shutdown-timeout", "600")
    with ServerProcess(*flags) as server:
        yield server
        assert "Traceback" not in server.log


def test_at_saturation_nothing_is_taken_for_a_hang(server: ServerProcess):
    course = asyncio.run(soak.soak(server, lambda course: course.num_requests < NUM_REQUESTS, num_clients=48))
    assert not course.wrong
    assert course.num_restarts == 0 and course.num_requests >= NUM_REQUESTS
    assert course.samples["core files"][-1] == course.samples["core files"][0]


def test_streams_whose_core_is_stopped_say_what_they_say_undisturbed(server: ServerProcess):
    async def stop() -> survive.Round:
        usual = await survive.undisturbed(server, survive.make_requests(8, 30))
        return await survive.disturbed(server, usual, survive.stop, 0.3, random.Random(1))

    found = asyncio.run(stop())
    assert not found.different
    assert found.restarts == 1
    assert found.noticed_s is not None and found.recovered_s is not None
    assert "has made no progress for" in server.log and "hang: no progress" in server.log


def test_while_a_killed_core_restarts_the_server_is_alive_but_not_ready_and_requests_wait(server: ServerProcess):
    async def look() -> tuple[survive.Round, Exchange, Exchange, Exchange, list[Exchange]]:
        usual = await survive.undisturbed(server, survive.make_requests(8, 30))
        disturbing = asyncio.ensure_future(survive.disturbed(server, usual, survive.kill, 0.3, random.Random(1)))
        while (ready := await ask(server.port, "/ready")).status == 200:
            await asyncio.sleep(0.002)
        new = asyncio.ensure_future(ask(server.port, "/v1/completions", {**LONG, "max_tokens": 3}))
        looks = [await ask(server.port, path) for path in ("/health", "/ping", "/live")]
        return await disturbing, await new, looks.pop(), ready, looks

    found, new, live, ready, unwell = asyncio.run(look())
    for one in (ready, *unwell):
        assert one.status == 503 and one.headers["retry-after"] == "1"
        assert "restarting" in json.loads(one.body)["error"]["message"]
    assert live.status == 200
    assert answer_of(new)
    assert not found.different and found.restarts == 1
    pages = [line for line in server.log.splitlines() if ": KV cache: " in line]
    assert len(pages) >= 2 and len({line.partition("KV cache: ")[2] for line in pages}) == 1


def test_a_second_signal_ends_at_once_and_the_log_says_how_many_answers(server: ServerProcess):
    async def end() -> list[Exchange]:
        streams = [asyncio.ensure_future(ask(server.port, "/v1/completions", LONG)) for _ in range(3)]
        while (await ask(server.port, "/load")).body != b'{"server_load":3}':
            await asyncio.sleep(0.005)
        server.send(signal.SIGTERM)
        await asyncio.to_thread(wait_until, lambda: "draining" in server.log, "it drains")
        server.send(signal.SIGTERM)
        return [await stream for stream in streams]

    exchanges = asyncio.run(end())
    assert server.wait() == 0
    assert [answer_of(one)[0][0]["finish_reason"] for one in exchanges] == ["abort"] * 3
    assert "exiting immediately: aborting 3 unfinished requests" in server.log
    assert "were cut" not in server.log


def test_servers_restarted_in_turn_behind_a_proxy_lose_nothing():
    service = asyncio.run(rolling.roll(1, num_clients=2, max_tokens=20, rng=random.Random(0)))
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
        os.kill(server.core_pid, signal.SIGTERM)  # as when a whole group is told to end
        server.send(signal.SIGTERM)
        await asyncio.sleep(1.5)  # one that reads nothing until the deadline has passed
        late = await asyncio.to_thread(_read_all, slow)
        return list(await asyncio.gather(*streams)), late

    with ServerProcess("--shutdown-timeout", "1") as server:
        exchanges, late = asyncio.run(drain(server))
        assert server.wait() == 0
        log = server.log
    whole = exchanges.pop()
    assert json.loads(whole.body)["choices"][0]["finish_reason"] == "abort"
    for exchange in exchanges:
        choices, _ = answer_of(exchange)
        assert {choice["finish_reason"] for choice in choices.values()} == {"abort"}
    assert late.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n") and b'"finish_reason":"abort"' in late
    assert "deadline: aborting 6 unfinished requests (finish_reason abort)" in log
    assert "Traceback" not in log and "ERROR" not in log and "engine core stopped" not in log


def _read_all(client: socket.socket) -> bytes:
    parts = []
    with client:
        while part := client.recv(1 << 16):
            parts.append(part)
    return b"".join(parts)


def test_a_server_whose_core_cannot_be_restarted_says_so_and_ends_with_an_error():
    async def lose(server: ServerProcess) -> tuple[Exchange, Exchange]:
        stream = asyncio.ensure_future(ask(server.port, "/v1/completions", LONG))
        while (await ask(server.port, "/load")).body != b'{"server_load":1}':
            await asyncio.sleep(0.005)
        os.kill(server.core_pid, signal.SIGKILL)
        return await stream, await ask(server.port, "/health")

    with ServerProcess("--max-restarts", "0") as server:
        stream, health = asyncio.run(lose(server))
        assert server.wait() == 1
    error = json.loads(stream.events[-2])["error"] if stream.events else json.loads(stream.body)["error"]
    assert (error["code"], error["type"]) == (503, "ServiceUnavailableError")
    assert health.status == 503 and b"restart the server" in health.body
