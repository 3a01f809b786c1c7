"""ResponseWriter: a response whole, and as a stream of events. Owns the state of one response."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from quire.core.outputs import CompletionOutput, RequestOutput
from quire.server.api.responses.envelope import CUT_OFF, FAILED, ResponseEnvelope, failure, with_status
from quire.server.api.responses.errors import field_of
from quire.server.api.responses.message_logprobs import MessageLogprobs
from quire.server.api.responses.output import COMPLETED, IN_PROGRESS, INCOMPLETE, OutputItems, StreamEvent
from quire.server.api.responses.tools import Origin
from quire.server.chat.answer_events import AnswerReader
from quire.server.chat.counts import AnswerCounts
from quire.server.chat.logprobs import LogprobsFormat
from quire.server.chat.parsing import ParsingPlan, answer_reader
from quire.server.http.errors import ApiError
from quire.tokenization.incremental import IncrementalDetokenizer
from quire.tokenization.tokenizer import Tokenizer

encode = msgspec.json.Encoder().encode


DELTA = b'event: response.output_text.delta\ndata: {"type":"response.output_text.delta","sequence_number":'


def event_bytes(kind: str, number: int, fields: dict[str, Any]) -> bytes:
    """One event of a stream."""
    data = encode({"type": kind, "sequence_number": number, **fields})
    return b"event: %s\ndata: %s\n\n" % (kind.encode(), data)


class ResponseWriter:
    """Writes a response.

    Args:
        form: what is around the output.
        counts: of what it costs.
        plan: what is read out of the answer; None = it is plain text.
        tokenizer: of the model.
        origins: what the functions of the chat are to the client.
        num_logprobs: likeliest tokens to return with each token; None = no log-probabilities.

    Attributes:
        on_event: called with each event that is written.
        is_ended: the last event was written.
    """

    def __init__(
        self,
        form: ResponseEnvelope,
        counts: AnswerCounts,
        plan: ParsingPlan | None,
        tokenizer: Tokenizer | None,
        num_logprobs: int | None,
        origins: Mapping[str, Origin] | None = None,
    ) -> None:
        self._form = form
        self._counts = counts
        self._plan = plan
        self._tokenizer = tokenizer
        self._num_logprobs = num_logprobs
        self._is_plain = plan is None and num_logprobs is None
        self._reader: AnswerReader | None = None
        self._logprobs: MessageLogprobs | None = None
        self._origins = origins
        self._items = OutputItems(origins=origins)
        self._number = 0
        self._is_begun = False
        self._reason: str | None = None
        self._ended: dict[str, Any] | None = None
        self.on_event: Callable[[bytes], None] = lambda event: None
        self.is_ended = False
        counts.usage.num_reasoning = 0

    @property
    def counts(self) -> AnswerCounts:
        """As `EventWriter.counts`."""
        return self._counts

    @property
    def response(self) -> dict[str, Any]:
        """The response as it is so far."""
        if self._ended is not None or self._reason is not None:
            return self._final()
        return self._form.content(IN_PROGRESS, self._items.snapshot())

    def whole(self, outputs: list[RequestOutput]) -> bytes:
        """As `EventWriter.whole`."""
        (output,) = outputs
        self._counts.note(0, output)
        for answer in output.outputs:
            self._push(output, answer)
        return encode(self._final())

    def begin(self, status: str = IN_PROGRESS) -> bytes:
        """The events that come first; nothing when they were written."""
        if self._is_begun:
            return b""
        self._is_begun = True
        started = {"response": self._form.content(status, [])}
        return self._written([("response.created", started), (f"response.{status}", started)])

    def events(self, prompt_index: int, output: RequestOutput) -> bytes:
        """As `EventWriter.events`."""
        begun = self.begin()
        self._counts.note(prompt_index, output)
        if self._is_plain and len(output.outputs) == 1 and output.outputs[0].finish_reason is None:
            text = output.outputs[0].text
            item_id = self._items.extend_message(text) if text else None
            if item_id is not None:  # nearly always
                return begun + self._text_delta(item_id, text)
        return begun + b"".join(self._written(self._push(output, answer)) for answer in output.outputs)

    def end(self) -> bytes:
        """As `EventWriter.end`."""
        response = self._final()
        self.is_ended = True
        return self._written([(f"response.{response['status']}", {"response": response})])

    def error(self, error: ApiError) -> bytes:
        """As `EventWriter.error`."""
        begun = self.begin()
        told = failure(error)
        response = with_status(self.response, FAILED, told)
        event = ("error", {"code": told["code"], "message": error.message, "param": field_of(error)})
        return begun + self._written([event]) + self.failed(response)

    def failed(self, response: dict[str, Any]) -> bytes:
        """The last event of a response that ended as `response`, otherwise than by its answer."""
        self._ended, self.is_ended = response, True
        return self._written([("response.failed", {"response": response})])

    def in_progress(self) -> bytes:
        """The event of a response that was queued and starts now."""
        return self._written([("response.in_progress", {"response": self._form.content(IN_PROGRESS, [])})])

    def _text_delta(self, item_id: str, text: str) -> bytes:
        """The event of a plain answer's text, whose one item is its message."""
        rest = b',"item_id":"%s","output_index":0,"content_index":0,"delta":%s,"logprobs":[]}\n\n'
        event = b"%s%d" % (DELTA, self._number) + rest % (item_id.encode(), encode(text))
        self._number += 1
        self.on_event(event)
        return event

    def _push(self, output: RequestOutput, answer: CompletionOutput) -> list[StreamEvent]:
        """What is new in the answer; its tokens of thinking are counted."""
        reader = self._reader or self._begin_reading(output.prompt_token_ids)
        is_end = answer.finish_reason is not None
        if self._logprobs is not None:
            self._logprobs.push(answer.token_ids, answer.logprobs or [], is_end=is_end)
        told = self._items.push(reader.push(answer.text, answer.token_ids, is_end=is_end))
        self._counts.usage.num_reasoning = reader.num_reasoning
        if is_end:
            self._reason = answer.finish_reason
            told += self._items.finish(COMPLETED if answer.finish_reason == "stop" else INCOMPLETE)
        return told

    def _begin_reading(self, prompt_token_ids: Sequence[int]) -> AnswerReader:
        reader = self._reader = answer_reader(self._plan, prompt_token_ids)
        if self._num_logprobs is not None:
            form = LogprobsFormat(self._tokenizer, self._num_logprobs, as_ids=False)
            self._logprobs = MessageLogprobs(form)
            if self._plan is not None and self._tokenizer is not None:
                skips = self._counts.work.params.skip_special_tokens
                text = IncrementalDetokenizer.create(self._tokenizer, prompt_token_ids, skip_special_tokens=skips)
                self._logprobs = MessageLogprobs(form, answer_reader(self._plan, prompt_token_ids), text)
            self._items = OutputItems(self._logprobs.new, self._logprobs.all, self._origins)
        return reader

    def _final(self) -> dict[str, Any]:
        """The response when it has ended."""
        if self._ended is not None:
            return self._ended
        usage, items = self._counts.usage, self._items.items
        if self._reason == "stop":
            response = self._form.content(COMPLETED, items, usage=usage)
        elif self._reason == "length":
            response = self._form.content(INCOMPLETE, items, usage=usage, reason="max_output_tokens")
        else:
            response = self._form.content(FAILED, items, usage=usage, error=CUT_OFF)
        self._ended = {**response, **self._counts.metrics(), **self._counts.prefix_cache()}
        return self._ended

    def _written(self, events: Iterable[StreamEvent]) -> bytes:
        written = []
        for kind, fields in events:
            written.append(event_bytes(kind, self._number, fields))
            self.on_event(written[-1])
            self._number += 1
        return b"".join(written)
