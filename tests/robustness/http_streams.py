"""A small HTTP client that notes when each piece of an answer came, and whether the answer was complete.

No library stands between the bytes and a test: a stream that ends without its last chunk is seen as truncated.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any

DONE = b"[DONE]"


@dataclass(slots=True)
class Exchange:
    """One request and what came back.

    Attributes:
        status: 0 = nothing came back.
        pieces: (monotonic seconds, bytes) of the body as it came.
        is_complete: the body ended as HTTP says it must.
        local_port: of the client's end of the connection.
    """

    sent_s: float = field(default_factory=time.monotonic)
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    pieces: list[tuple[float, bytes]] = field(default_factory=list)
    is_complete: bool = False
    local_port: int = 0

    @property
    def body(self) -> bytes:
        """All of it."""
        return b"".join(piece for _, piece in self.pieces)

    @property
    def events(self) -> list[bytes]:
        """Data of the server-sent events; comments are left out."""
        lines = self.body.split(b"\n\n")
        return [line.removeprefix(b"data: ") for line in lines if line.startswith(b"data: ")]

    @property
    def is_whole(self) -> bool:
        """A stream that ended well: its last event is [DONE]."""
        return self.status == 200 and self.is_complete and self.events[-1:] == [DONE]

    def silence_after(self, moment_s: float) -> float | None:
        """The longest wait for a piece of which some was after `moment_s`; None when it had ended by then."""
        times = [self.sent_s, *(at for at, _ in self.pieces)]
        waits = [after - before for before, after in zip(times, times[1:], strict=False) if after > moment_s]
        return max(waits, default=None)


async def ask(
    port: int, path: str, body: Any = None, exchange: Exchange | None = None, key: str | None = None
) -> Exchange:
    """Send a request (POST when it has a body) and read the answer to its end, into `exchange` as it comes."""
    exchange = exchange or Exchange()
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return exchange
    exchange.local_port = writer.get_extra_info("sockname")[1]
    try:
        writer.write(request_bytes(path, body, key))
        await _read_answer(reader, exchange)
    except (OSError, asyncio.IncompleteReadError, ValueError):
        pass  # the exchange says how far it came
    finally:
        writer.close()
    return exchange


def request_bytes(path: str, body: Any = None, key: str | None = None) -> bytes:
    """A request that closes its connection."""
    content = b"" if body is None else json.dumps(body).encode()
    head = f"{'GET' if body is None else 'POST'} {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
    head += "" if key is None else f"authorization: Bearer {key}\r\n"
    return f"{head}content-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n".encode() + content


async def _read_answer(reader: asyncio.StreamReader, exchange: Exchange) -> None:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    exchange.status = int(head[0].split(" ")[1])
    exchange.headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:-2])}
    if exchange.headers.get("transfer-encoding") == "chunked":
        while size := int((await reader.readuntil(b"\r\n"))[:-2], 16):
            piece = (await reader.readexactly(size + 2))[:-2]
            exchange.pieces.append((time.monotonic(), piece))
        await reader.readexactly(2)
    else:
        piece = await reader.readexactly(int(exchange.headers.get("content-length", "0")))
        exchange.pieces.append((time.monotonic(), piece))
    exchange.is_complete = True


def answer_of(exchange: Exchange) -> Any:
    """All that a stream said, but for how it was cut into events, its id, its times and what the cache had."""
    assert exchange.is_whole, f"status {exchange.status}, ends with {exchange.body[-200:]!r}"
    choices: dict[int, dict[str, Any]] = {}
    rest: dict[str, Any] = {}
    for event in exchange.events[:-1]:
        chunk = json.loads(event)
        for choice in chunk.pop("choices"):
            _join(choices.setdefault(choice["index"], {}), choice)
        usage = chunk.pop("usage", None)
        if usage:
            usage.pop("prompt_tokens_details", None)
            rest["usage"] = usage
        rest |= {name: value for name, value in chunk.items() if name not in ("id", "created")}
    return choices, rest


def _join(whole: dict[str, Any], part: dict[str, Any]) -> None:
    """Add a part of an answer: texts and lists are continued, everything else is replaced by what is not None."""
    for name, value in part.items():
        before = whole.get(name)
        if isinstance(value, dict):
            _join(whole.setdefault(name, {}), value) if isinstance(before, dict) else whole.update({name: dict(value)})
        elif isinstance(value, str | list) and type(before) is type(value) and name != "role":
            whole[name] = before + value
        elif value is not None or name not in whole:
            whole[name] = value
