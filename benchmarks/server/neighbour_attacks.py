"""The attacks of `bench_neighbours`. Each sends until its time is over and prints how often it was answered with what.

python -m benchmarks.server.neighbour_attacks NAME PORT SECONDS
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

Body = bytes | dict[str, Any]
TEXT = ("The quick brown fox jumps over the lazy dog. " * 6000)[:262_144]
SERIAL = itertools.count()
NUM_HELD, NUM_MEMBERS, NUM_FEWER = 60, 2_500_000, 330_000


def encoded(path: str, body: Body, key: str) -> bytes:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\nauthorization: Bearer {key}\r\n"
    return f"{head}content-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n".encode() + content


async def open_request(port: int, path: str, body: Body, key: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection on which one request was sent."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(encoded(path, body, key))
    return reader, writer


@dataclass(frozen=True)
class Attack:
    """What is sent, over how many connections.

    Attributes:
        requests: (path, body) without end.
        tenant: whose key is shown.
        is_held: the last byte is not sent.
        is_about_memory: whether memory must come back.
    """

    requests: Callable[[], Iterator[tuple[str, Body]]]
    num_connections: int = 1
    tenant: str = "alice"
    is_held: bool = False
    is_about_memory: bool = False


def tokenize() -> Iterator[tuple[str, Body]]:
    return itertools.repeat(("/tokenize", json.dumps({"prompt": TEXT}).encode()))


def detokenize() -> Iterator[tuple[str, Body]]:
    return itertools.repeat(("/detokenize", json.dumps({"tokens": [500] * 260_000}).encode()))


def chats() -> Iterator[tuple[str, Body]]:
    body = {"messages": [{"role": "user", "content": TEXT[:-1000]}], "max_tokens": 1}
    return itertools.repeat(("/v1/chat/completions", json.dumps(body).encode()))


@cache
def members_body(count: int) -> bytes:
    return b'{"prompt":"a",' + b",".join(b'"k%d":0' % number for number in range(count)) + b"}"


def members() -> Iterator[tuple[str, Body]]:
    return itertools.repeat(("/v1/completions", members_body(NUM_MEMBERS)))


def fewer_members() -> Iterator[tuple[str, Body]]:
    return itertools.repeat(("/v1/completions", members_body(NUM_FEWER)))


def ids() -> Iterator[tuple[str, Body]]:
    return itertools.repeat(("/v1/completions", b'{"prompt":[' + b"1," * 2_000_000 + b"1]}"))


def prompts() -> Iterator[tuple[str, Body]]:
    body = {"prompt": [[7 + number % 3000] * 200 for number in range(1000)], "max_tokens": 1}
    return itertools.repeat(("/v1/completions", json.dumps(body).encode()))


def held_body() -> Iterator[tuple[str, Body]]:
    return itertools.repeat(("/v1/completions", b'{"prompt":"' + b"x" * ((4 << 20) - 14) + b'"}'))


def structured(**form: Any) -> Callable[[], Iterator[tuple[str, Body]]]:
    """Completions of one form; `{}` in its text becomes a number that no other request has."""

    def bodies() -> Iterator[tuple[str, Body]]:
        while True:
            text = json.dumps(form).replace("{}", str(next(SERIAL)))
            yield "/v1/completions", {"prompt": "a", "max_tokens": 200, "structured_outputs": json.loads(text)}

    return bodies


SLOW_REGEX = "(([a-z]*)*)*" * 40
SCHEMA = {"type": "object", "properties": {"field_{}": {"type": "string", "maxLength": 40}}, "required": ["field_{}"]}
ATTACKS = {
    "tokenize-1": Attack(tokenize, 1),
    "tokenize-32": Attack(tokenize, 32),
    "tokenize-unlimited": Attack(tokenize, 4, "mallory"),
    "detokenize": Attack(detokenize, 2, "mallory"),
    "chats-32": Attack(chats, 32),
    "chats-unlimited": Attack(chats, 4, "mallory"),
    "members": Attack(members, 2, "mallory", is_about_memory=True),
    "members-4mb": Attack(fewer_members, 4, "mallory", is_about_memory=True),
    "ids": Attack(ids, 4, "mallory", is_about_memory=True),
    "prompts": Attack(prompts, 1, "mallory"),
    "held-bodies": Attack(held_body, NUM_HELD, "mallory", is_held=True, is_about_memory=True),
    "grammar-ebnf": Attack(
        structured(grammar='root ::= root root | root root root | "a" | "aa" | [a-z] | ""'), 8, "mallory"
    ),
    "grammar-sum": Attack(structured(grammar='root ::= root "+" root | root root | "x" | ""'), 8, "mallory"),
    "grammar-regex": Attack(structured(regex=SLOW_REGEX), 8, "mallory"),
    "grammar-lark": Attack(
        structured(grammar='start: start start | start start start | "a" | "aa" | ""'), 8, "mallory"
    ),
    "compile-schemas": Attack(structured(json=SCHEMA), 64, "mallory"),
    "compile-regexes": Attack(structured(regex="x{}" + SLOW_REGEX), 64, "mallory"),
}


async def send(attack: Attack, port: int, deadline: float, statuses: Counter[str]) -> None:
    """One connection's requests."""
    key = f"key-of-{attack.tenant}"
    for path, body in attack.requests():
        if time.monotonic() >= deadline:
            return
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            data = encoded(path, body, key)
            writer.write(data[:-1] if attack.is_held else data)
            answer = await reader.read()
            statuses[answer[9:12].decode() or "closed"] += 1
            writer.close()
        except OSError as error:
            statuses[type(error).__name__] += 1


async def run(name: str, port: int, seconds: float) -> dict[str, int]:
    attack, statuses = ATTACKS[name], Counter[str]()
    next(attack.requests())  # bodies that take long to make are kept
    print("ready", flush=True)
    deadline = time.monotonic() + seconds
    work = asyncio.gather(*(send(attack, port, deadline, statuses) for _ in range(attack.num_connections)))
    with suppress(asyncio.TimeoutError, TimeoutError):
        await asyncio.wait_for(work, seconds)
    return dict(statuses)


if __name__ == "__main__":
    print(json.dumps(asyncio.run(run(sys.argv[1], int(sys.argv[2]), float(sys.argv[3])))))
