"""Clients that are too many, too slow, or send what is no HTTP."""

from __future__ import annotations

import json
import logging
import re
import resource
import socket
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import httpx
import pytest
from uvicorn import Config
from uvicorn.server import ServerState

from quire.config.server import LimitsConfig
from quire.server.http.connection import protocol_factory
from quire.server.http.connection_limits import (
    GRACE_S,
    ConnectionWatch,
    LimitedConnection,
    max_connections,
)
from quire.server.http.strict_http import Phase
from tests.server.engines import ScriptedEngine
from tests.server.servers import RunningServer
from tests.server.test_protocol import CHAT, HELLO, error_of, post

HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"


def ask(server: RunningServer, *parts: bytes) -> bytes:
    """What comes back until the server closes."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        for part in parts:
            connection.sendall(part)
        return b"".join(iter(lambda: receive(connection), b""))


def receive(connection: socket.socket) -> bytes:
    try:
        return connection.recv(1 << 16)
    except ConnectionResetError:
        return b""


def response(raw: bytes) -> httpx.Response:
    head, _, body = raw.partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines[1:])
    return httpx.Response(int(lines[0].split()[1]), headers=headers, content=body)


@pytest.fixture(scope="module")
def hasty():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("quire.server.http.connection_limits.SWEEP_S", 0.05)
        patch.setattr("quire.server.http.connection_limits.GRACE_S", 0.3)
        with RunningServer(ScriptedEngine(), head_timeout=1, body_timeout=1, timeout_keep_alive=60) as running:
            yield running


def half_a_body(path: bytes) -> bytes:
    head = b"POST %s HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n" % path
    return head + b"content-length: 100\r\n\r\n{"


HEADS = {
    "nothing": b"",
    "half a line": b"GET /v1/mod",
    "a head without its end": HEAD + b"x: y\r\n",
}
BODIES = {"read": (b"/v1/completions", 408), "no route": (b"/nothing", 404), "not read": (b"/ping", 200)}
SLOW = {
    **HEADS,
    **{name: half_a_body(path) for name, (path, _) in BODIES.items()},
    "a second head": b"GET /live HTTP/1.1\r\nhost: localhost\r\n\r\nGET /li",
}


@pytest.fixture(scope="module")
def slow(hasty) -> dict[str, bytes]:
    """What each of them gets; they wait at once."""
    with ThreadPoolExecutor(len(SLOW)) as pool:
        return dict(zip(SLOW, pool.map(lambda sent: ask(hasty, sent), SLOW.values()), strict=True))


@pytest.mark.parametrize("name", HEADS)
def test_cve_2026_9540_a_head_that_does_not_come_ends_the_connection(slow, name):
    assert slow[name] == b""


@pytest.mark.parametrize("name", BODIES)
def test_cve_2026_9540_a_body_that_does_not_come_ends_the_connection(slow, name):
    assert response(slow[name]).status_code == BODIES[name][1]


def test_cve_2026_9540_a_second_head_that_does_not_come_ends_the_connection(slow):
    raw = slow["a second head"]
    assert raw.startswith(b"HTTP/1.1 200") and raw.count(b"HTTP/1.1") == 1


def test_an_idle_connection_that_is_kept_alive_is_not_a_slow_one(hasty):
    with httpx.Client() as client:
        first = client.get(hasty.url + "/live")
        address = first.extensions["network_stream"].get_extra_info("client_addr")
        client_of = [one for one in hasty.server.server_state.connections if one.client == address]
        watch = ConnectionWatch(client_of, LimitsConfig(head_timeout=1), clock=iter([0.0, 100.0]).__next__)
        watch.sweep()
        watch.sweep()
        again = client.get(hasty.url + "/live")
        assert again.extensions["network_stream"].get_extra_info("client_addr") == address


def test_a_long_answer_is_no_slow_request(hasty):
    hasty.engine.interval_s = 0.25
    try:
        assert post(hasty, CHAT, {**HELLO, "max_tokens": 7, "stream": True}).text.endswith("[DONE]\n\n")
    finally:
        hasty.engine.interval_s = 0.0


class Transport:
    def __init__(self) -> None:
        self.size, self.is_aborted = 0, False

    def get_write_buffer_size(self) -> int:
        return self.size

    def abort(self) -> None:
        self.is_aborted = True


def watched(phase: Phase, **limits: int) -> tuple[Any, Callable[[float], bool]]:
    """A connection, and what sweeps it at a time and says whether it was ended."""
    connection: Any = object.__new__(LimitedConnection)
    connection.phase, connection.cycle, connection.client = phase, None, None
    connection.flow, connection.transport = SimpleNamespace(read_paused=False), Transport()
    now = [0.0]
    watch = ConnectionWatch([connection], LimitsConfig(**limits), clock=lambda: now[0])

    def at(seconds: float) -> bool:
        now[0] = seconds
        watch.sweep()
        return connection.transport.is_aborted

    return connection, at


def test_time_for_a_body_begins_with_the_body():
    connection, at = watched(Phase.HEAD, head_timeout=10, body_timeout=10)
    assert not at(0) and not at(9)
    connection.phase = Phase.BODY
    assert not at(11) and not at(20)
    connection.phase = Phase.DONE
    assert not at(100)
    connection.phase = Phase.BODY
    assert not at(200) and at(211 + GRACE_S)


def test_a_client_that_reads_nothing_is_cut_off_and_one_that_reads_slowly_is_not():
    connection, at = watched(Phase.DONE, write_timeout=10)
    connection.transport.size = 9000
    assert not at(0) and not at(9)
    connection.transport.size = 8000
    assert not at(18) and not at(27)
    assert at(28)


def test_more_connections_than_allowed_are_told_so_at_once():
    with RunningServer(ScriptedEngine(), max_connections=2) as server:
        others = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(2)]
        server.wait_until(lambda: len(server.server.server_state.connections) == 2)
        refused = response(ask(server))
        assert refused.status_code == 503 and refused.headers["retry-after"] and error_of(refused)
        assert refused.headers["connection"] == "close"
        for other in others:
            other.close()
        server.wait_until(lambda: not server.server.server_state.connections)
        assert post(server, CHAT, HELLO).status_code == 200


LONG = b"content-length: 20000000\r\n\r\n", b" " * 20_000_000


@pytest.mark.parametrize(
    ("head", "statuses"),
    [(HEAD + b"connection: close\r\n", (413,)), (b"no HTTP\r\n", (400, 431))],
    ids=["too long", "no HTTP"],
)
def test_a_client_that_sends_all_before_it_reads_gets_its_answer(server, head, statuses):
    assert response(ask(server, head, *LONG)).status_code in statuses
    server.wait_until(lambda: not server.server.server_state.connections)


def test_a_client_that_sends_on_for_long_is_given_up(server, monkeypatch):
    monkeypatch.setattr("quire.server.http.lingering.LINGER_BYTES", 1 << 20)
    with pytest.raises(OSError):
        ask(server, HEAD + b"connection: close\r\n", *LONG)
    monkeypatch.setattr("quire.server.http.lingering.LINGER_S", 0.05)
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(b"no HTTP\r\n")
        server.wait_until(lambda: not server.server.server_state.connections)


def test_a_connection_too_many_that_sends_all_before_it_reads_is_told_so():
    with RunningServer(ScriptedEngine(), max_connections=1) as server, socket.socket() as first:
        first.connect(("127.0.0.1", server.port))
        first.sendall(HEAD)
        server.wait_until(lambda: len(server.server.server_state.connections) == 1)
        assert response(ask(server, HEAD, *LONG)).status_code == 503


def test_a_refused_connection_takes_nothing_and_counts_for_nothing():
    make = protocol_factory(LimitsConfig(max_connections=1))
    common = {
        "config": Config(None, log_config=None, h11_max_incomplete_event_size=1000),
        "server_state": ServerState(),
        "app_state": {},
    }
    taken, refused = make(**common, _loop=MagicMock()), make(**common, _loop=MagicMock())
    taken.connection_made(MagicMock())
    refused.connection_made(transport := MagicMock())
    assert b"503" in transport.write.call_args[0][0] and transport.write_eof.called
    refused.data_received(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")
    refused.connection_lost(None)
    assert common["server_state"].connections == {taken} and not common["server_state"].tasks


def test_idle_connections_make_room_the_oldest_first(monkeypatch):
    make = protocol_factory(LimitsConfig(max_connections=3))
    common = {
        "config": Config(None, log_config=None, h11_max_incomplete_event_size=1000),
        "server_state": ServerState(),
        "app_state": {},
    }
    busy, older, newer, young, last = (make(**common, _loop=MagicMock()) for _ in range(5))
    for opened_s, connection in enumerate((busy, older, newer, young)):
        clock = SimpleNamespace(monotonic=lambda now=opened_s: 10.0 + now)  # not time's own: loops of other tests run
        monkeypatch.setattr("quire.server.http.connection_limits.time", clock)
        connection.connection_made(MagicMock())
        if connection is busy:
            connection.data_received(b"GET / HT")
    assert older.transport.close.called and not young.transport.write.called
    assert not busy.transport.close.called and not newer.transport.close.called
    older.connection_lost(None)
    newer.data_received(b"GET / HT")
    last.connection_made(MagicMock())
    assert not young.transport.close.called, "it has just come"


def test_the_limit_of_open_files_leaves_some_for_the_engine():
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert max_connections(LimitsConfig(max_connections=7)) == 7
    assert 0 < max_connections(LimitsConfig()) < files


NOT_HTTP = {
    "random bytes": b"\x00\x01\x02\xff\r\n\r\n",
    "tls": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    "no version": b"GET /v1/models\r\n\r\n",
    "two lengths": HEAD + b"content-length: 5\r\ncontent-length: 6\r\n\r\n12345",
    "a negative length": HEAD + b"content-length: -1\r\n\r\n",
    "a length in words": HEAD + b"content-length: many\r\n\r\n",
    "an encoding nobody knows": HEAD + b"transfer-encoding: gzip, chunked\r\n\r\n",
    "a folded name": HEAD + b"transfer-encoding : chunked\r\n\r\n",
    "two hosts": HEAD + b"host: y\r\n\r\n",
    "no host": b"GET /live HTTP/1.1\r\n\r\n",
    "lines that end with a line feed": b"GET /live HTTP/1.1\nhost: x\n\n",
    "a zero in a header": HEAD + b"x: a\x00b\r\n\r\n",
    "the preface of HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "HTTP/2.0": b"GET /live HTTP/2.0\r\nhost: localhost\r\n\r\n",
    "another server's URL": b"GET http://y/live HTTP/1.1\r\nhost: localhost\r\n\r\n",
    "a tunnel": b"CONNECT y:80 HTTP/1.1\r\nhost: localhost\r\n\r\n",
    "no path": b"OPTIONS * HTTP/1.1\r\nhost: localhost\r\n\r\n",
    "an encoding that looks like chunks": HEAD + b"transfer-encoding: xchunked\r\n\r\n",
    "chunks twice": HEAD + b"transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n\r\n",
    "an encoding after a tab": HEAD + b"transfer-encoding: \x0bchunked\r\n\r\n",
    "a length with a sign": HEAD + b"content-length: +5\r\n\r\n12345",
    "a length in hexadecimal": HEAD + b"content-length: 0x5\r\n\r\n12345",
    "chunks in HTTP/1.0": HEAD.replace(b"1.1", b"1.0") + b"transfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "a chunk with a huge extension": HEAD + b"transfer-encoding: chunked\r\n\r\n1;" + b"x" * 200_000,
    "huge trailers": HEAD + b"transfer-encoding: chunked\r\n\r\n0\r\n" + b"x: y\r\n" * 200_000,
    "a bare return": HEAD + b"x: a\rb\r\n\r\n",
    "a chunk of minus five": HEAD + b"transfer-encoding: chunked\r\n\r\n-5\r\nabc\r\n0\r\n\r\n",
}


@pytest.mark.parametrize("raw", NOT_HTTP.values(), ids=NOT_HTTP.keys())
def test_what_is_no_http_is_answered_from_the_catalogue(server, raw):
    answer = response(ask(server, raw))
    assert answer.status_code == 400 and error_of(answer)["type"] == "BadRequestError"


def test_cve_2025_48956_a_head_beyond_the_limit_is_told_so(server):
    answer = response(ask(server, b"GET /live HTTP/1.1\r\nhost: localhost\r\nx: " + b"a" * 40_000))
    assert answer.status_code == 431 and error_of(answer)["type"] == "RequestTooLargeError"


def test_a_length_and_chunks_together_do_not_smuggle_a_request(server):
    inner = b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
    raw = ask(server, HEAD + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n" + inner)
    assert raw.count(b"HTTP/1.1 ") == 1
    assert response(raw).status_code == 400


def test_trailers_are_no_headers(server):
    body = json.dumps(HELLO).encode()
    trailers = b"x-request-id: forged\r\nx-api-key: forged\r\nconnection: close\r\n"
    chunks = b"transfer-encoding: chunked\r\nconnection: close\r\n\r\n%x\r\n%s\r\n0\r\n%s\r\n" % (
        len(body),
        body,
        trailers,
    )
    raw = ask(server, HEAD.replace(b"completions", b"chat/completions") + chunks)
    assert raw.startswith(b"HTTP/1.1 200") and b"forged" not in raw


def test_an_upgrade_is_not_done_and_its_request_is_answered(server):
    upgrade = b"GET /live HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n"
    raw = ask(server, upgrade + b"GET /live HTTP/1.1\r\nhost: localhost\r\n\r\n")
    assert raw.startswith(b"HTTP/1.1 200") and raw.count(b"HTTP/1.1") == 1


def test_a_client_that_leaves_ends_its_pipelined_requests(server):
    body = json.dumps({**HELLO, "max_tokens": 1000, "stream": True}).encode()
    one = HEAD.replace(b"completions", b"chat/completions") + b"content-length: %d\r\n\r\n%s" % (len(body), body)
    server.engine.interval_s = 0.05
    try:
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall(3 * one)
            server.wait_until(lambda: server.engine.live)
        server.wait_until(lambda: not server.engine.live and not server.state.admission.num_answers)
    finally:
        server.engine.interval_s = 0.0


def test_a_body_that_breaks_off_in_its_chunks_leaves_no_trace_in_the_log(server, caplog):
    body = json.dumps({**HELLO, "stream": True}).encode()
    for sent in (b"", body[:9], body):
        chunk = b"%x\r\n%s\r\n" % (len(sent), sent) if sent else b""
        answer = ask(
            server,
            HEAD.replace(b"completions", b"chat/completions")
            + b"transfer-encoding: chunked\r\n\r\n"
            + chunk
            + b"zz\r\n",
        )
        assert error_of(response(answer))["type"] == "BadRequestError"
    assert not [one for one in caplog.records if one.exc_info]


def test_clients_that_vanish_leave_no_connection(server):
    for part in (b"", b"GET", HEAD, HEAD + b"content-length: 9\r\n\r\n{"):
        connection = socket.create_connection(("127.0.0.1", server.port))
        connection.sendall(part)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()
    server.wait_until(lambda: not server.server.server_state.connections)
    assert server.state.admission.num_answers == 0


def test_a_path_cannot_forge_lines_of_the_log(server, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("quire"), "propagate", True)
    caplog.set_level("INFO", "quire.access")
    httpx.get(server.url + "/nothing%0d%0aINFO%20forged%1b[2J")
    server.wait_until(lambda: any("forged" in one.getMessage() for one in caplog.records))  # logged after the answer
    (line,) = [one.getMessage() for one in caplog.records if "forged" in one.getMessage()]
    assert re.fullmatch(r"[\x20-\x7e]+", line)
