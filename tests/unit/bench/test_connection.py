"""A connection on a clock that the test sets: the times in a record are those of the bytes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, cast

from quire.bench.connection import Answer, Connection, request_bytes
from quire.bench.records import RequestRecord, Target
from quire.bench.summary import collect, figures

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":4}}\n\ndata: [DONE]\n\n'


def token(text: str = "x", reason: str = "null") -> bytes:
    return b'data: {"choices":[{"text":"%s","finish_reason":%s}]}\n\n' % (text.encode(), reason.encode())


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Transport:
    def __init__(self) -> None:
        self.written = b""
        self.is_aborted = False

    def write(self, data: bytes) -> None:
        self.written += data

    def abort(self) -> None:
        self.is_aborted = True


def play(script: Callable[[Connection, Clock], Awaitable[None]]) -> tuple[Answer, Transport]:
    """The answer to one request while `script` plays the server."""

    async def run() -> tuple[Answer, Transport]:
        clock, transport = Clock(), Transport()
        connection = Connection(clock)
        connection.connection_made(cast(Any, transport))
        asking = asyncio.ensure_future(connection.ask(b"request"))
        await asyncio.sleep(0)
        await script(connection, clock)
        return await asking, transport

    return asyncio.run(run())


def arrivals(*parts: tuple[float, bytes], closes: bool = True) -> Callable[[Connection, Clock], Awaitable[None]]:
    async def script(connection: Connection, clock: Clock) -> None:
        for seconds, data in parts:
            clock.now = 100 + seconds
            connection.data_received(data)
        if closes:
            connection.connection_lost(None)

    return script


def test_the_figures_of_a_request_are_exactly_those_of_its_bytes():
    answer, transport = play(
        arrivals(
            (0.125, HEAD), (0.25, token()), (0.375, token()), (0.75, token() + token("", "null")),
            (1.0, token("", '"length"')), (1.5, USAGE),
        )
    )  # fmt: skip
    assert transport.written == b"request" and answer.failure is None
    reader = answer.reader
    record = RequestRecord(
        index=0, due_s=98, dispatched_s=99, started_s=100, ended_s=reader.last_choice_s or 0,
        event_times=reader.event_times, num_prompt_tokens=3, num_output_tokens=4, token_source="usage",
    )  # fmt: skip
    samples = collect([record])
    assert (samples.ttft, samples.itl, samples.tpot, samples.e2el) == ([250], [125, 375, 0], [250], [1000])
    result = figures([record], 100, metrics=["ttft"], percentiles=[50], objectives={})
    assert (result["duration"], result["output_throughput"], result["total_token_throughput"]) == (1, 4, 7)


def test_a_connection_that_breaks_in_the_answer_is_an_early_close():
    chunked = HEAD.replace(b"connection: close", b"transfer-encoding: chunked")
    answer, _ = play(arrivals((1, chunked), (2, b"%x\r\n" % len(token()) + token())))
    assert answer.failure is not None and answer.failure.kind == "early close" and answer.ended_s == 102


def test_a_stream_without_length_that_ends_early_is_incomplete():
    answer, _ = play(arrivals((1, HEAD), (2, token())))
    assert answer.failure is not None and answer.failure.kind == "incomplete stream"


def test_bytes_that_are_no_http_end_the_connection():
    answer, transport = play(arrivals((1, b"220 mail.example ESMTP\r\n"), closes=False))
    assert answer.failure is not None and answer.failure.kind == "malformed response" and transport.is_aborted


def test_an_error_response_is_read_whole():
    body = b'{"error": {"message": "slow down"}}'
    head = b"HTTP/1.1 429 Too Many\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
    answer, _ = play(arrivals((1, head), (2, body[:9]), (3, body[9:]), closes=False))
    assert answer.failure is not None and (answer.failure.kind, answer.failure.message) == ("status 429", "slow down")


def test_a_request_says_what_it_is():
    target = Target(host="::1", port=80, path="/v1/completions", models_path="/v1/models", headers={"x-a": "b"})
    assert request_bytes(target, b"{}") == (
        b"POST /v1/completions HTTP/1.1\r\nhost: [::1]:80\r\nx-a: b\r\ncontent-type: application/json\r\n"
        b"content-length: 2\r\n\r\n{}"
    )
    assert request_bytes(target, None, "/v1/models").startswith(b"GET /v1/models HTTP/1.1\r\n")
