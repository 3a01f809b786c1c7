"""Where the requests of a batch go: an application in this process, or a server elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from quire.bench.connection import Answer, ConnectionPool, request_bytes
from quire.bench.records import Target

MAX_REPLY_BYTES = 1 << 30
TRIES = 6
FIRST_PAUSE_S, MAX_PAUSE_S = 0.5, 60.0
TRY_LATER = frozenset((429, 503))


@dataclass(frozen=True, slots=True)
class Reply:
    """What came back.

    Attributes:
        status: of HTTP; 0 = nothing came back.
        request_id: as the server names the request.
        body: as it came; without a reply, why there is none.
    """

    status: int
    request_id: str
    body: bytes

    @property
    def is_final(self) -> bool:
        """False when asking again later is of use: the request stays open."""
        return self.status != 0 and self.status not in TRY_LATER


class Endpoint(Protocol):
    """Answers requests."""

    async def ask(self, url: str, body: dict[str, Any], request_id: str) -> Reply:
        """The reply to a POST."""


class LocalEndpoint:
    """An ASGI application of this process, called without a socket: the routes and checks are the server's own.

    Args:
        headers: of every request.
    """

    def __init__(self, app: Any, headers: Mapping[str, str]) -> None:
        self._app = app
        self._headers = [(name.encode(), value.encode()) for name, value in headers.items()]

    async def ask(self, url: str, body: dict[str, Any], request_id: str) -> Reply:
        """As `Endpoint.ask`."""
        content = msgspec.json.encode(body)
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
            "path": url, "raw_path": url.encode(), "query_string": b"", "root_path": "", "client": None, "server": None,
            "headers": [
                (b"content-type", b"application/json"), (b"content-length", str(len(content)).encode()),
                (b"x-request-id", request_id.encode()), *self._headers,
            ],
            "state": {},
        }  # fmt: skip
        status, parts, is_read = 0, [], False

        async def receive() -> dict[str, Any]:
            nonlocal is_read
            if is_read:
                await asyncio.Event().wait()  # the client never goes away
            is_read = True
            return {"type": "http.request", "body": content, "more_body": False}

        async def send(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            else:
                parts.append(message.get("body", b""))

        await self._app(scope, receive, send)
        return Reply(status, request_id, b"".join(parts))


class RemoteEndpoint:
    """A server elsewhere; what it cannot take now is asked again, after the time that it says.

    Args:
        target: its address.
        prefix: what stands before /v1 in its paths.
    """

    def __init__(self, target: Target, prefix: str, timeout_s: float) -> None:
        self._target = target
        self._prefix = prefix
        self._timeout_s = timeout_s
        self._pool = ConnectionPool(target, max_body_bytes=MAX_REPLY_BYTES)

    async def ask(self, url: str, body: dict[str, Any], request_id: str) -> Reply:
        """As `Endpoint.ask`."""
        target = msgspec.structs.replace(
            self._target, path=self._prefix + url, headers={**self._target.headers, "x-request-id": request_id}
        )
        request = request_bytes(target, msgspec.json.encode(body))
        pause_s = FIRST_PAUSE_S
        for number in range(TRIES):
            answer = await self._pool.ask(request, self._timeout_s)
            reply = _reply(answer, request_id)
            if reply.is_final or number == TRIES - 1:
                break
            await asyncio.sleep(max(pause_s, _asked_pause_s(answer)))
            pause_s *= 2
        return reply

    def close(self) -> None:
        """Close its connections."""
        self._pool.close()


def _reply(answer: Answer, request_id: str) -> Reply:
    is_whole = answer.failure is None or answer.failure.kind.startswith("status ")
    if answer.status and is_whole:
        return Reply(answer.status, answer.headers.get("x-request-id", request_id), answer.body)
    message = "no reply" if answer.failure is None else f"{answer.failure.kind}: {answer.failure.message}"
    return Reply(0, request_id, message.encode())


def _asked_pause_s(answer: Answer) -> float:
    text = answer.headers.get("retry-after", "")
    return min(float(text), MAX_PAUSE_S) if text.isascii() and text.isdigit() else 0.0
