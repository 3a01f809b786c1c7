"""The reader of HTTP responses: every way a body ends, cut anywhere, and what is refused."""

from __future__ import annotations

import pytest

from quire.bench.http_response import ResponseError, ResponseParser

CHUNKED = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"5\r\nhello\r\nA;name=value\r\n, world!!!\r\n0\r\nx-trailer: 1\r\n\r\n"
)
SIZED = b"HTTP/1.1 404 Not Found\r\ncontent-length: 11\r\n\r\n11 bytes ok"
INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n" + SIZED


def read(*parts: bytes) -> tuple[ResponseParser, bytes]:
    parser = ResponseParser()
    return parser, b"".join([parser.feed(part) for part in parts])


@pytest.mark.parametrize(
    ("response", "status", "body"),
    [(CHUNKED, 200, b"hello, world!!!"), (SIZED, 404, b"11 bytes ok"), (INTERIM, 404, b"11 bytes ok")],
    ids=["chunked", "content-length", "interim"],
)
def test_a_response_reads_the_same_wherever_it_is_cut(response: bytes, status: int, body: bytes):
    cuts = [[response], [bytes([one]) for one in response]]
    cuts += [[response[:at], response[at:]] for at in range(1, len(response))]
    for parts in cuts:
        parser, found = read(*parts)
        assert (parser.status, found, parser.is_complete, parser.keeps_alive) == (status, body, True, True)
        parser.end()


def test_a_body_without_a_length_ends_with_the_connection():
    parser, body = read(b"HTTP/1.0 200 OK\r\n\r\n", b"all ", b"of it")
    assert body == b"all of it" and not parser.is_complete and not parser.keeps_alive
    parser.end()
    assert parser.is_complete


@pytest.mark.parametrize("status", [b"204", b"304"])
def test_some_statuses_have_no_body(status: bytes):
    assert read(b"HTTP/1.1 " + status + b" X\r\n\r\n")[0].is_complete


def test_a_connection_that_closes_early_is_noticed_at_every_byte():
    for response in (CHUNKED, SIZED):
        for end in range(len(response)):
            parser = ResponseParser()
            if end:
                parser.feed(response[:end])
            with pytest.raises(ResponseError) as caught:
                parser.end()
            assert caught.value.kind == "early close"


def test_close_is_heard():
    assert not read(SIZED.replace(b"\r\n\r\n", b"\r\nConnection: Close\r\n\r\n"))[0].keeps_alive


@pytest.mark.parametrize(
    "response",
    [
        b"SSH-2.0-OpenSSH\r\n",
        b"HTTP/1.1 2x0 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n folded: 1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip\r\n\r\n",
        CHUNKED.replace(b"5\r\n", b"+5\r\n"),
        CHUNKED.replace(b"5\r\n", b"4\r\n"),
        CHUNKED.replace(b"5\r\n", b"\r\n"),
        CHUNKED.replace(b"5\r\n", b"f" * 17 + b"\r\n"),
        CHUNKED.replace(b"5\r\n", b"5" * 2000),
        CHUNKED + b"more",
        SIZED + b"more",
        b"HTTP/1.1 200 OK\r\nx: " + b"y" * 70000,
    ],
    ids=[
        "another protocol", "no status", "no colon", "folded", "negative length", "unknown coding", "signed size",
        "longer than its size", "no size", "huge size", "endless size", "bytes after the end", "too long a body",
        "endless head",
    ],
)  # fmt: skip
def test_what_is_no_response_is_named(response: bytes):
    with pytest.raises(ResponseError) as caught:
        read(response)
    assert caught.value.kind == "malformed response" and str(caught.value)
