"""Streams that run beside the attack, each compared with what it said before it began. Owns the counts."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from tests.robustness.server_fuzz.cases import http
from tests.robustness.server_fuzz.client import Connection

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
SEEDED = {"temperature": 1.0, "ignore_eos": True}
QUESTIONS: tuple[tuple[str, dict[str, Any]], ...] = (
    (COMPLETIONS, {"prompt": "Once upon a time", "temperature": 0, "max_tokens": 60, "ignore_eos": True}),
    (COMPLETIONS, {"prompt": [5, 6, 7, 8] * 20, "temperature": 0, "max_tokens": 50, "ignore_eos": True, "logprobs": 2}),
    (COMPLETIONS, {"prompt": "The", "seed": 7, "n": 2, "max_tokens": 40, **SEEDED, "top_p": 0.9, "top_k": 40}),
    (COMPLETIONS, {"prompt": ["A", "B"], "seed": 8, "max_tokens": 40, **SEEDED, "repetition_penalty": 1.2}),
    (CHAT, {"messages": [{"role": "user", "content": "What is 27 + 58?"}], "temperature": 0, "max_tokens": 40}),
    (CHAT, {"messages": [{"role": "user", "content": "Count to ten."}], "temperature": 0, "max_tokens": 60,
            "ignore_eos": True, "return_token_ids": True}),
    (CHAT, {"messages": [{"role": "user", "content": "Tell a story."}], "seed": 9, "max_tokens": 60, **SEEDED,
            "logprobs": True, "top_logprobs": 3}),
    (CHAT, {"messages": [{"role": "user", "content": "Hello"}], "seed": 2**62, "max_tokens": 50, **SEEDED,
            "frequency_penalty": 0.5, "presence_penalty": 0.5, "min_p": 0.01}),
)  # fmt: skip


class Canaries:
    """The streams.

    Attributes:
        num_compared: streams that ended.
        differences: what was said instead; the run has failed when there are any.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self._expected: list[bytes] = []
        self._tasks: list[asyncio.Task[None]] = []
        self.num_compared = 0
        self.differences: list[str] = []

    async def start(self) -> None:
        """Ask each question alone, twice, then all of them for ever."""
        for number in range(len(QUESTIONS)):
            alone = await self._ask(number)
            assert alone == await self._ask(number), f"canary {number} does not repeat itself when it is alone"
            self._expected.append(alone)
        self._tasks = [asyncio.create_task(self._run(number)) for number in range(len(QUESTIONS))]

    async def stop(self) -> None:
        """End the streams."""
        for task in self._tasks:
            task.cancel()
        for result in await asyncio.gather(*self._tasks, return_exceptions=True):
            if isinstance(result, Exception):
                self.differences.append(f"a canary could not ask: {result!r}")

    async def _run(self, number: int) -> None:
        while True:
            found = await self._ask(number)
            self.num_compared += 1
            if found != self._expected[number]:
                self.differences.append(
                    f"canary {number}: {found.decode()} instead of {self._expected[number].decode()}"
                )
                return

    async def _ask(self, number: int) -> bytes:
        path, question = QUESTIONS[number]
        body = json.dumps({**question, "stream": True, "stream_options": {"include_usage": True}}).encode()
        connection = await Connection.open(self._port)
        try:
            connection.writer.write(http(path, body, headers={"connection": "close"}))
            answer = await connection.answer("POST")
        finally:
            connection.close()
        return joined(answer.body)


def joined(stream: bytes) -> bytes:
    """What a stream says, however it was cut into events: ids, times and what was cached left out."""
    blocks = [block for block in stream.split(b"\n\n") if block and not block.startswith(b":")]
    choices: dict[int, dict[str, Any]] = {}
    rest: dict[str, Any] = {"end": blocks[-1].decode() if blocks else ""}
    for block in blocks[:-1]:
        event = json.loads(block.removeprefix(b"data: "))
        if "error" in event:
            rest["error"] = event["error"]
        for choice in event.get("choices", ()):
            _join(choices.setdefault(choice["index"], {}), choice)
        if event.get("usage"):
            rest["usage"] = {name: event["usage"][name] for name in ("prompt_tokens", "completion_tokens")}
    return json.dumps([rest, choices], sort_keys=True).encode()


def _join(whole: dict[str, Any], part: Any) -> None:
    for name, value in part.items():
        if name == "text_offset" or value is None:
            continue
        if isinstance(value, dict):
            _join(whole.setdefault(name, {}), value)
        elif isinstance(value, (str, list)) and name in whole:
            whole[name] = whole[name] + value if name != "role" else value
        else:
            whole[name] = value
