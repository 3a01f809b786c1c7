"""Attacks below the body: heads, lengths, methods, targets, pipelining, clients that are slow or go away."""

from __future__ import annotations

import gzip
import random
from collections.abc import Callable

from tests.robustness.server_fuzz.cases import OK_OR_REFUSED, Case, http

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
BODY = b'{"prompt":"Once","max_tokens":2}'
LONG_BODY = b'{"prompt":"Once","max_tokens":200,"ignore_eos":true,"stream":%s}'
PATHS = (
    "/v1/models", "/v1/models/leaf", "/v1/models/%2e%2e%2fetc", "/v1/models/" + "a" * 3000, "/health", "/live",
    "/ready",
    "/ping", "/version", "/load", "/metrics", "/openapi.json", "/docs", "/redoc", "/nothing", "/", "//", "/v1", "/v1/",
    "/v1/completions/", "/../../etc/passwd", "/%00", "/%0d%0aset-cookie:x=1", "/%ff%fe", "/v1/models?" + "a=1&" * 900,
    "/v1/responses", "/v1/responses/resp_x", "/v1/responses/resp_x/cancel", "/v1/responses/resp_x/input_items?limit=x",
    "/v1/responses/%00", "/v1/responses/" + "a" * 3000, "/v1/responses/resp_x?stream=true&starting_after=" + "9" * 5000,
    "/%E2%82%AC", "/v1/chat/completions#x", "/;/", "/v1/completions;a=b", "*",
)  # fmt: skip
METHODS = ("GET", "HEAD", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT", "PROPFIND", "get", "X" * 200)


def path(rng: random.Random) -> Case:
    """Any path with any method."""
    method = rng.choice((*METHODS, "GET", "GET", "POST"))
    return Case("path", (http(rng.choice(PATHS), method=method),), methods=(method,))


def target(rng: random.Random) -> Case:
    """Request lines that are unusual or wrong."""
    line = rng.choice((
        b"GET http://fuzz/v1/models HTTP/1.1", b"CONNECT fuzz:443 HTTP/1.1", b"GET /v1/models",
        b"GET /v1/models HTTP/0.9",
        b"GET /v1/models HTTP/1.0", b"GET /v1/models HTTP/2.0", b"PRI * HTTP/2.0", b"GET  /v1/models HTTP/1.1", b"GET",
        b"GET /v1/models HTTP/9.9", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"GET /v1/\xc3\xa9 HTTP/1.1",
        b"GET /\x00 HTTP/1.1", b"G\x00T / HTTP/1.1", b"GET /v1/models HTTP/1.1 x", b"", b"OPTIONS * HTTP/1.1",
        b"GET /" + b"a" * 40_000 + b" HTTP/1.1", b"quit", b"GET /v1/models HTTP/1.1\rX: 1",
    ))  # fmt: skip
    ending = rng.choice((b"\r\nhost: [::1]\r\n\r\n", b"\r\n\r\n", b"\n\n", b"\nhost: localhost\n\n"))
    return Case("target", (line + ending,), "half", methods=("GET",), may_be_silent=True)


def head(rng: random.Random) -> Case:
    """Header lines that are many, huge or wrong."""
    lines = rng.choice((
        b"x: " + b"a" * rng.choice((1000, 31_000, 33_000, 70_000, 2_000_000)),
        b"\r\n".join(b"x-%d: y" % i for i in range(rng.choice((50, 500, 3000, 20_000)))),
        b"x" * rng.choice((100, 40_000)) + b": 1", b"x : 1", b": 1", b"x\r\n folded", b"x: a\r\n b", b"x: \x00",
        b"x: \xff\xfe",
        b"x: a\rb", b"host: other", b"\xc3\xa9: 1", b"x: 1\r\nx: 2\r\nx: 3", b"connection: keep-alive, close",
        b"connection: upgrade\r\nupgrade: websocket\r\nsec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==",
        b"connection: upgrade\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAARAAAAAAAIAAAAA", b"expect: 100-continue",
        b"expect: 200-ok", b"x-request-id: " + b"a" * 200, b"x-request-id: a b\xff", b"authorization: Bearer \xff\x00",
        b"authorization: " + b"Bearer " * 500, b"range: bytes=0-1", b"origin: http://evil.example",
        b"accept-encoding: gzip, br, zstd", b"x-forwarded-for: \xff", b"forwarded: for=unknown",
    ))  # fmt: skip
    data = b"POST /v1/completions HTTP/1.1\r\nhost: [::1]\r\ncontent-type: application/json\r\n" + lines
    return Case("head", (data + b"\r\ncontent-length: %d\r\n\r\n" % len(BODY) + BODY,), may_be_silent=True)


def content(rng: random.Random) -> Case:
    """Bodies whose type or encoding is not what it says."""
    types = (
        "", "text/plain", "application/xml", "application/json; charset=utf-16", "application/json;;;", "json", "*/*",
        "application/json, text/plain", "multipart/form-data; boundary=x", "application/x-www-form-urlencoded", "é",
        "application/vnd.api+json", "+json", "APPLICATION/JSON", "application/json; charset=" + "x" * 9000,
    )  # fmt: skip
    headers = {"content-type": rng.choice(types)}
    body = BODY
    if rng.random() < 0.4:
        headers = {"content-type": "application/json", "content-encoding": rng.choice(("gzip", "br", "deflate", "x"))}
        body = rng.choice((gzip.compress(BODY), gzip.compress(b"[" * (1 << 20)), BODY, BODY.decode().encode("utf-16")))
    return Case("content", (http(rng.choice((COMPLETIONS, CHAT, "/tokenize")), body, headers=headers),), is_kept=True)


def length(rng: random.Random) -> Case:
    """Lengths that are wrong, doubled or contradicted, and chunks that lie."""
    start = b"POST /v1/completions HTTP/1.1\r\nhost: [::1]\r\ncontent-type: application/json\r\n"
    chunk = b"%x\r\n%s\r\n" % (len(BODY), BODY)
    rest = rng.choice((
        b"content-length: -1\r\n\r\n", b"content-length: 1e3\r\n\r\n", b"content-length: abc\r\n\r\n" + BODY,
        b"content-length: 99999999999999999999\r\n\r\n" + BODY, b"content-length: 33554433\r\n\r\n" + BODY,
        b"content-length: +5\r\n\r\n12345", b"content-length: 0x10\r\n\r\n" + BODY, b"content-length: 5\r\n\r\n" + BODY,
        b"content-length: 32\r\ncontent-length: 33\r\n\r\n" + BODY, b"content-length: 32, 32\r\n\r\n" + BODY,
        b"content-length: 32\r\ntransfer-encoding: chunked\r\n\r\n" + chunk + b"0\r\n\r\n",
        b"transfer-encoding: chunked\r\ncontent-length: 4\r\n\r\n0\r\n\r\nGET /live HTTP/1.1\r\nhost: [::1]\r\n\r\n",
        b"transfer-encoding: chunked, chunked\r\n\r\n" + chunk, b"transfer-encoding: gzip, chunked\r\n\r\n" + chunk,
        b"transfer-encoding: identity\r\n\r\n" + BODY, b"transfer-encoding : chunked\r\n\r\n" + chunk,
        b"transfer-encoding: \x0bchunked\r\n\r\n" + chunk, b"transfer-encoding: chunked\r\n\r\n" + chunk + b"0\r\n\r\n",
        b"transfer-encoding: chunked\r\n\r\n-5\r\nabc\r\n0\r\n\r\n", b"transfer-encoding: chunked\r\n\r\nzz\r\n\r\n",
        b"transfer-encoding: chunked\r\n\r\nffffffffffffffffff\r\n" + BODY,
        b"transfer-encoding: chunked\r\n\r\n5\r\nab\r\n0\r\n\r\n",
        b"transfer-encoding: chunked\r\n\r\n" + b"1;" + b"x" * 50_000 + b"\r\n{\r\n0\r\n\r\n",
        b"transfer-encoding: chunked\r\n\r\n" + b"".join(b"1\r\n%c\r\n" % byte for byte in BODY) + b"0\r\n\r\n",
        b"transfer-encoding: chunked\r\n\r\n" + chunk + b"0\r\nx: " + b"y" * rng.choice((5, 40_000)) + b"\r\n\r\n",
        b"\r\n", b"\r\n" + BODY,
    ))  # fmt: skip
    return Case("length", (start + rest,), "half", may_be_silent=True)


def pipeline(rng: random.Random) -> Case:
    """Several requests in one write, some of them broken."""
    parts, methods = [], []
    for _ in range(rng.randint(2, 12)):
        kind = rng.random()
        if kind < 0.5:
            parts.append(http(rng.choice(("/live", "/v1/models", "/nothing")), method="GET"))
            methods.append("GET")
        elif kind < 0.9:
            parts.append(http(COMPLETIONS, rng.choice((BODY, b"{", b'{"prompt":[-1]}'))))
            methods.append("POST")
        else:
            parts.append(rng.choice((b"\r\n", b"\x00\x01\x02\r\n\r\n", b"GET / HTTP/1.1\r\n")))
            break
    end = rng.choice(("half", "half", "reset", "close"))
    return Case("pipeline", (b"".join(parts),), end, methods=tuple(methods), may_be_silent=True)


def slow(rng: random.Random) -> Case:
    """A byte now and then, until the server or the client has had enough."""
    whole = http(COMPLETIONS, BODY)
    begins_at = rng.choice((0, 20, whole.index(b"\r\n\r\n") + 2, len(whole) - len(BODY), len(whole) - 5))
    sends: list[bytes | float] = [whole[:begins_at]] if begins_at else []
    for at in range(begins_at, min(len(whole), begins_at + rng.randint(1, 8))):
        sends += [whole[at : at + 1], rng.choice((0.05, 0.2, 1.0))]
    return Case("slow", tuple(sends), rng.choice(("hold", "close", "reset", "half")), may_be_silent=True)


def aborted(rng: random.Random) -> Case:
    """Clients that go away in any phase: head, body, queue, first token, stream."""
    stream = rng.random() < 0.7
    body = LONG_BODY % (b"true" if stream else b"false")
    whole = http(rng.choice((COMPLETIONS, COMPLETIONS, "/tokenize", "/nothing")), body)
    if rng.random() < 0.3:
        return Case(
            "aborted", (whole[: rng.randrange(len(whole))],), rng.choice(("reset", "close", "half")), may_be_silent=True
        )
    sends = (whole, rng.choice((0.0, 0.001, 0.01, 0.05, 0.2)))
    return Case("aborted", sends, rng.choice(("reset", "close", "leave", "half")), may_be_silent=True)


def unread(rng: random.Random) -> Case:
    """A client that asks for much and reads nothing."""
    body = b'{"prompt":"Once","max_tokens":300,"ignore_eos":true,"stream":true,"n":4,"logprobs":20}'
    return Case(
        "unread",
        (http(COMPLETIONS, body), rng.choice((0.1, 0.5, 1.0))),
        rng.choice(("reset", "close")),
        may_be_silent=True,
    )


def silent(rng: random.Random) -> Case:
    """A connection on which nothing comes."""
    return Case(
        "silent", (rng.choice((0.0, 0.5)),), rng.choice(("hold", "close", "reset")), methods=(), may_be_silent=True
    )


def junk(rng: random.Random) -> Case:
    """Bytes that are no HTTP."""
    return Case("junk", (rng.randbytes(rng.randint(1, 3000)),), "half", methods=("GET",), may_be_silent=True)


QUICK: tuple[Callable[[random.Random], Case], ...] = (path, target, head, content, length, pipeline, aborted, junk)
LONG: tuple[Callable[[random.Random], Case], ...] = (slow, unread, silent)
assert OK_OR_REFUSED
