"""The answers of /v1/messages, whole and as a stream. Owns the state of one response."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from quire.core.outputs import CompletionOutput, RequestOutput
from quire.parsers.events import Content
from quire.server.api.anthropic.calls import Call, MessageEvent, ToolCallBuffer
from quire.server.api.anthropic.errors import error_content
from quire.server.api.anthropic.message import stop_reason, usage_content
from quire.server.chat.answer_events import AnswerReader
from quire.server.chat.counts import AnswerCounts
from quire.server.chat.parsing import ParsingPlan, answer_reader
from quire.server.http.errors import ApiError

encode = msgspec.json.Encoder().encode

TEXT_DELTA = (
    b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,'
    b'"delta":{"type":"text_delta","text":%b}}\n\n'
)
PING = b'event: ping\ndata: {"type":"ping"}\n\n'
STOP = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
TEXT, THINKING = "text", "thinking"


class MessageWriter:
    """Writes one message.

    Args:
        counts: of the response.
        plan: what is read out of the answer; None = it is plain text.
        warnings: about fields that were not used.
        request_id: sent with errors inside a stream.
    """

    def __init__(
        self, counts: AnswerCounts, plan: ParsingPlan | None, warnings: Sequence[str], request_id: str
    ) -> None:
        self.counts = counts
        self._plan = plan
        self._warnings = list(warnings)
        self._request_id = request_id
        self._reader: AnswerReader | None = None
        self._holder = ToolCallBuffer()
        self._open: str | None = None
        self._index = -1
        self._has_calls = False
        self._end: tuple[str, str | None] | None = None
        if plan is not None and plan.has_reasoning:
            counts.usage.num_reasoning = 0

    def events(self, prompt_index: int, output: RequestOutput) -> bytes:
        """As `EventWriter.events`."""
        self.counts.note(prompt_index, output)
        if self._plan is None and self._open == TEXT and not output.finished:  # nearly always: text that goes on
            text = "".join(answer.text for answer in output.outputs)
            return TEXT_DELTA % (self._index, encode(text)) if text else b""
        parts = []
        if self._reader is None:
            head = {**self._head(), "content": [], "stop_reason": None, "stop_sequence": None}
            parts = [event("message_start", message={**head, "usage": usage_content(self.counts.usage)}), PING]
        for answer in output.outputs:
            for told in self._read(output, answer):
                parts += self._to_bytes(told)
            if answer.finish_reason is not None:
                parts += self._close()
                self._end = self._reason(answer)
        return b"".join(parts)

    def end(self) -> bytes:
        """As `EventWriter.end`."""
        reason, sequence = self._end or (None, None)
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        return event("message_delta", delta=delta, usage=usage_content(self.counts.usage), **self._extra()) + STOP

    def error(self, error: ApiError) -> bytes:
        """As `EventWriter.error`."""
        return b"event: error\ndata: %b\n\n" % error_content(error, self._request_id)

    def whole(self, outputs: list[RequestOutput]) -> bytes:
        """As `EventWriter.whole`."""
        (output,) = outputs
        (answer,) = output.outputs
        self.counts.note(0, output)
        blocks: list[dict[str, Any]] = []
        for told in self._read(output, answer):
            if isinstance(told, Call):
                blocks.append({**block_of(told), "input": msgspec.Raw(told.arguments.encode())})
                continue
            kind = kind_of_text(told)
            if not blocks or blocks[-1]["type"] != kind:
                blocks.append(block_of(told))
            blocks[-1][kind] += told.text
        reason, sequence = self._reason(answer)
        ended = {"content": blocks, "stop_reason": reason, "stop_sequence": sequence}
        usage = usage_content(self.counts.usage)
        return encode({**self._head(), **ended, "usage": usage, **self._extra()})

    def _read(self, output: RequestOutput, answer: CompletionOutput) -> list[MessageEvent]:
        """What is new in the answer; its tokens of thinking are counted."""
        if self._reader is None:
            self._reader = answer_reader(self._plan, output.prompt_token_ids)
        is_end = answer.finish_reason is not None
        told = self._holder.push(self._reader.push(answer.text, answer.token_ids, is_end=is_end), is_end=is_end)
        if self.counts.usage.num_reasoning is not None:
            self.counts.usage.num_reasoning = self._reader.num_reasoning
        self._has_calls = self._has_calls or any(isinstance(one, Call) for one in told)
        return told

    def _reason(self, answer: CompletionOutput) -> tuple[str, str | None]:
        """Why the answer ended."""
        limit = self.counts.work.params.max_tokens
        is_at_limit = limit is None or self.counts.usage.num_completion >= limit
        return stop_reason(answer, has_calls=self._has_calls, is_at_limit=is_at_limit)

    def _to_bytes(self, told: MessageEvent) -> list[bytes]:
        """`told` as bytes."""
        if isinstance(told, Call):
            parts = [*self._close(), self._begin(told)]
            delta = {"type": "input_json_delta", "partial_json": told.arguments}
            return [*parts, event("content_block_delta", index=self._index, delta=delta), *self._close()]
        kind, parts = kind_of_text(told), []
        if self._open != kind:
            parts = [*self._close(), self._begin(told)]
        if kind == TEXT:
            return [*parts, TEXT_DELTA % (self._index, encode(told.text))]
        delta = {"type": "thinking_delta", "thinking": told.text}
        return [*parts, event("content_block_delta", index=self._index, delta=delta)]

    def _begin(self, told: MessageEvent) -> bytes:
        block = block_of(told)
        self._open = block["type"]
        self._index += 1
        return event("content_block_start", index=self._index, content_block=block)

    def _close(self) -> list[bytes]:
        """End the block that is open, if any."""
        kind, self._open = self._open, None
        if kind is None:
            return []
        stop = event("content_block_stop", index=self._index)
        if kind != THINKING:
            return [stop]
        signature = {"type": "signature_delta", "signature": ""}
        return [event("content_block_delta", index=self._index, delta=signature), stop]

    def _head(self) -> dict[str, Any]:
        """What a message says whatever the answer."""
        head = {"id": self.counts.work.public_id, "type": "message", "role": "assistant", "model": self.counts.model}
        return {**head, "warnings": self._warnings} if self._warnings else head

    def _extra(self) -> dict[str, Any]:
        """What a message says at its end where it was asked for."""
        return {**self.counts.metrics(), **self.counts.prefix_cache()}


def event(name: str, **content: Any) -> bytes:
    """An event of a stream."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), encode({"type": name, **content}))


def kind_of_text(told: MessageEvent) -> str:
    """The type of the block that a text goes to, which is also the name of its field there."""
    return TEXT if isinstance(told, Content) else THINKING


def block_of(told: MessageEvent) -> dict[str, Any]:
    """The block that `told` begins, empty."""
    if isinstance(told, Call):
        return {"type": "tool_use", "id": told.call_id, "name": told.name, "input": {}}
    if isinstance(told, Content):
        return {"type": TEXT, TEXT: ""}
    return {"type": THINKING, THINKING: "", "signature": ""}
