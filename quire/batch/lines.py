"""Lines of batch files: requests in, results out. Pure functions.

A request is {"custom_id", "method", "url", "body"}, a result {"id", "custom_id", "response": {"status_code",
"request_id", "body"}, "error"}. A line that is no request gets a result with `error` alone, which names the line.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import msgspec

from quire.utils.checks import shown

URLS = ("/v1/completions", "/v1/chat/completions")
FIELDS = ("custom_id", "method", "url", "body")
MAX_ID_CHARS = 1024


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """A request of a batch.

    Attributes:
        line: its number, from 1.
        unknown: names of further fields of the line, which have no effect.
    """

    line: int
    custom_id: str
    url: str
    body: dict[str, Any]
    unknown: tuple[str, ...] = ()

    @property
    def request_id(self) -> str:
        """The same in every run."""
        return f"batch-{hashlib.sha256(self.custom_id.encode()).hexdigest()[:24]}"

    def with_seed(self, engine_seed: int) -> dict[str, Any]:
        """The body, with a seed made of `custom_id` where it has none: an answer does not depend on what ran before."""
        if self.body.get("seed") is not None:
            return self.body
        digest = hashlib.sha256(f"{engine_seed}/{self.custom_id}".encode()).digest()
        return {**self.body, "seed": int.from_bytes(digest[:8], "big") >> 2}


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line that is no request.

    Attributes:
        custom_id: where it has a usable one.
    """

    line: int
    custom_id: str | None
    message: str


def read_line(number: int, text: bytes) -> BatchRequest | BadLine:
    """The request on a line, or why it is none."""
    try:
        record = msgspec.json.decode(text)
    except (ValueError, RecursionError) as error:
        return BadLine(number, None, f"the line is not JSON: {error}")
    if not isinstance(record, dict):
        return BadLine(number, None, "the line is not an object")
    custom_id = record.get("custom_id")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MAX_ID_CHARS:
        return BadLine(
            number, None, f"custom_id is {shown(custom_id)}, it must be a string of 1 to {MAX_ID_CHARS} characters"
        )
    method, url, body = record.get("method"), record.get("url"), record.get("body")
    if method != "POST":
        return BadLine(number, custom_id, f"method is {shown(method)}, it must be POST")
    if url not in URLS:
        return BadLine(number, custom_id, f"url is {shown(url)}, it must be one of {', '.join(URLS)}")
    if not isinstance(body, dict):
        return BadLine(number, custom_id, f"body is {shown(body)}, it must be an object")
    if body.get("stream"):
        return BadLine(number, custom_id, "body.stream is set: streaming is not supported in a batch")
    return BatchRequest(number, custom_id, url, body, tuple(name for name in record if name not in FIELDS))


def result_line(request: BatchRequest, status: int, request_id: str, body: bytes) -> bytes:
    """The result of a request that was answered."""
    try:
        content = msgspec.json.decode(body)
    except ValueError:
        content = {"error": {"message": body[:1000].decode("utf-8", "replace"), "code": status}}
    response = {"status_code": status, "request_id": request_id, "body": content}
    return _line(request.custom_id, request.line, response, None)


def error_line(bad: BadLine) -> bytes:
    """The result of a line that is no request."""
    return _line(bad.custom_id, bad.line, None, {"code": "invalid_line", "message": bad.message, "line": bad.line})


def _line(custom_id: str | None, number: int, response: Any, error: Any) -> bytes:
    name = f"line {number}" if custom_id is None else custom_id
    result_id = f"batch_req_{hashlib.sha256(name.encode()).hexdigest()[:24]}"
    return msgspec.json.encode(
        {"id": result_id, "custom_id": custom_id, "response": response, "error": error}
    ) + b"\n"  # fmt: skip
