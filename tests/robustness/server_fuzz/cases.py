"""A case of the server's fuzzing: bytes and pauses on one connection, and what may come back. No state."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

OK_OR_REFUSED = frozenset((200, 400, 403, 404, 405, 408, 413, 415, 429, 431))

Send = bytes | float  # bytes to write, or seconds to wait


@dataclass(frozen=True)
class Case:
    """One visit to the server.

    Attributes:
        kind: for the counts.
        sends: written in order; a number is a pause in seconds.
        end: "answer" reads every answer; "close", "reset" and "half" go away after writing ("half" still reads);
            "leave" resets after the first bytes of the answer; "hold" waits for the server to close.
        methods: of the requests in `sends`, so that answers can be told apart; () when they are no requests.
        may_be_silent: the server may close without an answer.
        is_kept: the connection may serve other cases before and after.
        statuses: that may be answered.
    """

    kind: str
    sends: tuple[Send, ...]
    end: str = "answer"
    methods: tuple[str, ...] = ("POST",)
    may_be_silent: bool = False
    is_kept: bool = False
    statuses: frozenset[int] = field(default=OK_OR_REFUSED)


def rng_of(seed: int, index: int) -> random.Random:
    """The random numbers of case `index`; the same for ever."""
    return random.Random(f"{seed}/{index}")


def http(
    path: str, body: bytes = b"", *, method: str = "POST", headers: dict[str, str] | None = None, version: str = "1.1"
) -> bytes:
    """A well-formed request."""
    lines = {"host": "localhost", **({"content-type": "application/json"} if body else {}), **(headers or {})}
    if body or method == "POST":
        lines.setdefault("content-length", str(len(body)))
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return f"{method} {path} HTTP/{version}\r\n{head}\r\n".encode("latin-1") + body
