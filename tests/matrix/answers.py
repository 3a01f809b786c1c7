"""What a response of /v1/chat/completions says, read alike from a whole answer and from the events of a stream."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from tests.robustness.http_streams import Exchange


class RefusedError(Exception):
    """A response that is no answer.

    Attributes:
        status: of HTTP.
        error: the object of the body.
    """

    def __init__(self, status: int, error: dict[str, Any]) -> None:
        super().__init__(f"{status} {error}")
        self.status = status
        self.error = error


@dataclass
class Answer:
    """One of a response's answers.

    Attributes:
        calls: (name, JSON text of the arguments).
        logprobs: an entry for each token.
    """

    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: Any = None
    logprobs: list[dict[str, Any]] = field(default_factory=list)

    @property
    def texts(self) -> list[str]:
        """All that was written, mark-up left out."""
        return [self.reasoning, self.content, *(part for call in self.calls for part in call)]

    def add(self, choice: dict[str, Any]) -> None:
        """Take in a choice of a whole answer, or the next part of a streamed one."""
        assert self.finish_reason is None, "nothing follows the reason"
        part = choice["message"] if "message" in choice else choice["delta"]
        self.content += part.get("content") or ""
        self.reasoning += part.get("reasoning") or ""
        for call in part.get("tool_calls") or ():
            function = call["function"]
            if "id" in call:
                assert call.get("index", len(self.calls)) == len(self.calls)
                self.calls.append((function["name"], function["arguments"]))
            else:
                assert call["index"] == len(self.calls) - 1
                name, arguments = self.calls[-1]
                self.calls[-1] = name, arguments + function["arguments"]
        self.finish_reason = choice["finish_reason"]
        self.stop_reason = choice.get("stop_reason", self.stop_reason)
        self.logprobs += (choice.get("logprobs") or {}).get("content") or ()


@dataclass
class Response:
    """A response.

    Attributes:
        answers: by index.
        usage: without what the prefix cache had, which is `num_cached`.
        metrics: of the engine, where the server tells them; None in a stream that was cut before.
        num_events: of its stream; 0 = whole.
    """

    answers: list[Answer]
    usage: dict[str, Any]
    num_cached: int
    metrics: dict[str, Any]
    num_events: int = 0

    def same(self) -> tuple[list[Answer], dict[str, Any]]:
        """What must not depend on circumstances."""
        return self.answers, self.usage

    @property
    def answer(self) -> Answer:
        """The only one."""
        (answer,) = self.answers
        return answer


def response_of(exchange: Exchange) -> Response:
    """What an exchange says.

    Raises:
        RefusedError: its status is not 200.
    """
    if exchange.status != 200:
        raise RefusedError(exchange.status, json.loads(exchange.body)["error"])
    is_stream = exchange.headers["content-type"].startswith("text/event-stream")
    assert not is_stream or exchange.is_whole, exchange.body[-300:]
    parts = [json.loads(event) for event in exchange.events[:-1]] if is_stream else [json.loads(exchange.body)]
    answers: dict[int, Answer] = {}
    usage: dict[str, Any] = {}
    metrics: dict[str, Any] = {}
    for part in parts:
        if "error" in part:
            raise RefusedError(part["error"]["code"], part["error"])
        for choice in part["choices"]:
            answers.setdefault(choice["index"], Answer()).add(choice)
        usage = part.get("usage") or usage
        metrics = part.get("metrics") or metrics
    cached = usage.pop("prompt_tokens_details", {}).get("cached_tokens", 0)
    ordered = [answers[index] for index in sorted(answers)]
    return Response(ordered, usage, cached, metrics, len(exchange.events) if is_stream else 0)
