"""AnswerReader: a streamed answer from the bytes of its body, each with the time it came. No clock, no sockets.

Called by `connection`; reads the streams of `/v1/completions` and `/v1/chat/completions` of any server.
"""

from __future__ import annotations

from typing import Any

import msgspec

from quire.bench.records import Failure
from quire.utils.checks import shown

MAX_EVENT_BYTES = 1 << 24
ABORTED = frozenset(("abort", "error"))


class _Delta(msgspec.Struct):
    content: Any = None
    reasoning: Any = None
    reasoning_content: Any = None
    tool_calls: Any = None


class _Choice(msgspec.Struct):
    text: Any = None
    delta: _Delta | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


class EventSplitter:
    """Server-sent events: the data of each from the bytes of a body, as they come. Lines end with LF or CR LF."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, body: bytes) -> list[bytes]:
        """The data of the events that `body` completes.

        Raises:
            ValueError: an event is larger than 16 MiB.
        """
        if self._rest:
            body = self._rest + body
        *lines, self._rest = body.split(b"\n")
        if len(self._rest) > MAX_EVENT_BYTES:
            raise ValueError("an event is larger than 16 MiB")
        events = []
        for line in lines:
            if line.startswith(b"data:"):
                self._data.append(line[5:].strip())
            elif (not line or line == b"\r") and self._data:
                events.append(b"\n".join(self._data))
                self._data.clear()
        return events

    def end(self) -> list[bytes]:
        """The data of an event whose blank line is missing at the end."""
        return self.feed(b"\n\n")


class AnswerReader:
    """Reads one answer.

    Attributes:
        event_times: of each event that brought tokens.
        last_choice_s: of the last event with a choice in it; None = there was none.
        failure: what the stream itself says went wrong, or why it cannot be read.
    """

    _decode = staticmethod(msgspec.json.Decoder(_Event).decode)

    def __init__(self) -> None:
        self.event_times: list[float] = []
        self.last_choice_s: float | None = None
        self.failure: Failure | None = None
        self._splitter = EventSplitter()
        self._is_done = False
        self._num_token_ids: int | None = None
        self._usage: _Usage | None = None
        self._finish_reason: str | None = None

    def feed(self, body: bytes, now: float) -> None:
        """Take in a part of the body that came at `now`."""
        if self.failure is not None:
            return
        try:
            for data in self._splitter.feed(body):
                self._read(data, now)
        except ValueError as error:  # of msgspec too
            self.failure = Failure("malformed event", str(error))

    def end(self, now: float) -> None:
        """The body is complete; sets `failure` when the answer is not."""
        if self.failure is not None:
            return
        try:
            for data in self._splitter.end():
                self._read(data, now)
        except ValueError as error:
            self.failure = Failure("malformed event", str(error))
        self.failure = self.failure or self._verdict()

    @property
    def num_prompt_tokens(self) -> int | None:
        """As the server counts them; None = it does not say."""
        return None if self._usage is None else self._usage.prompt_tokens

    @property
    def output_tokens(self) -> tuple[int | None, str]:
        """How many tokens the answer has, and the source: "usage", "token_ids", or "" for none."""
        if self._usage is not None and self._usage.completion_tokens is not None:
            return self._usage.completion_tokens, "usage"
        return (None, "") if self._num_token_ids is None else (self._num_token_ids, "token_ids")

    def _read(self, data: bytes, now: float) -> None:
        if data == b"[DONE]":
            self._is_done = True
            return
        event = self._decode(data)
        if event.error is not None and self.failure is None:
            self.failure = Failure("error event", error_message(event.error))
        if event.usage is not None:
            self._usage = event.usage
        if not event.choices:
            return
        self.last_choice_s = now
        brings_tokens = False
        for choice in event.choices:
            if choice.token_ids is not None:
                self._num_token_ids = (self._num_token_ids or 0) + len(choice.token_ids)
            if choice.finish_reason is not None:
                self._finish_reason = choice.finish_reason
            brings_tokens = brings_tokens or _brings_tokens(choice)
        if brings_tokens or (self._finish_reason is not None and not self.event_times):
            # An answer whose first token ends it has no text: the event with the reason is its first token.
            self.event_times.append(now)

    def _verdict(self) -> Failure | None:
        if self._finish_reason in ABORTED:
            return Failure("aborted", f"finish_reason is {self._finish_reason}")
        if not self._is_done and self._finish_reason is None:
            return Failure("incomplete stream", "it ended without finish_reason and without [DONE]")
        if not self.event_times and self._finish_reason is None:
            return Failure("empty response", "no event brought a token")
        return None


def _brings_tokens(choice: _Choice) -> bool:
    if choice.token_ids:
        return True
    delta = choice.delta
    if delta is not None:
        return bool(delta.content or delta.reasoning or delta.reasoning_content or delta.tool_calls)
    # A completion's event without text stands for a token whose bytes are not a whole character yet.
    return bool(choice.text) or (choice.text is not None and choice.finish_reason is None)


def error_message(error: Any) -> str:
    """The text of an `error` object, whatever its form."""
    message = error.get("message") if isinstance(error, dict) else error
    return message[:300] if isinstance(message, str) else shown(error)


def refusal(status: int, body: bytes) -> Failure:
    """What a response that is no answer says."""
    try:
        content = msgspec.json.decode(body)
        error = content.get("error", content.get("detail", content)) if isinstance(content, dict) else content
        message = error_message(error)
    except ValueError:
        message = body[:300].decode("utf-8", "replace").strip() or "no text"
    return Failure(f"status {status}", message)
