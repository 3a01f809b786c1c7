"""The answers of /v1/chat/completions, whole and as a stream. Owns the state of one response."""

from __future__ import annotations

from typing import Any

from quire.core.outputs import CompletionOutput, RequestOutput
from quire.server.chat.answer import AnswerEnvelope, encode
from quire.server.chat.answer_events import AnswerEvent
from quire.server.chat.chat_message import delta_of, message_of
from quire.server.chat.counts import AnswerCounts
from quire.server.chat.logprobs import LogprobsFormat, prompt_logprobs
from quire.server.chat.parsing import ParsedAnswer, ParsingPlan
from quire.server.chat.protocol.chat import ChatRequest
from quire.server.chat.sse import DONE, error_event
from quire.server.http.errors import ApiError

AFTER_TEXT = b'},"logprobs":null,"finish_reason":null,"token_ids":null}]}\n\n'


class ChatWriter:
    """Writes chat answers.

    Args:
        form: what is around them.
        request: as it came.
        role: of the answers.
        echoed: what each answer begins with; "" unless the last message is echoed.
        plan: what is read out of the answers; None = they are plain text.
    """

    def __init__(
        self,
        form: AnswerEnvelope,
        request: ChatRequest,
        role: str,
        echoed: str = "",
        plan: ParsingPlan | None = None,
    ) -> None:
        self.form = form
        self._request = request
        self._role = role
        self._echoed = echoed
        self._started: set[int] = set()
        self._head = form.event_head()
        self._logprobs = None
        if request.logprobs:
            self._logprobs = LogprobsFormat(
                form.tokenizer, request.top_logprobs or 0, as_ids=form.shows_ids, named=request.logprob_token_ids
            )
        self._is_plain = self._logprobs is None and not request.return_token_ids and not form.shows_usage_always
        self._plan = plan
        self._parsed: dict[int, ParsedAnswer] = {}
        form.usage.num_reasoning = 0

    @property
    def counts(self) -> AnswerCounts:
        """As `EventWriter.counts`."""
        return self.form

    def events(self, prompt_index: int, output: RequestOutput) -> bytes:
        """As `EventWriter.events`."""
        parts = []
        if not self._started:
            parts = [self._start(index, output) for index in range(self.form.work.params.n)]
        self.form.note(prompt_index, output)
        if output.prompt_progress is not None:
            parts.append(self.form.progress_event({"index": 0, "delta": {}}, output.prompt_progress))
        for answer in output.outputs:
            if self._plan is not None:
                parts += self._parsed_events(self._plan, output, answer)
            elif self._is_plain and answer.finish_reason is None:
                if answer.text:
                    parts.append(
                        b'%s{"index":%d,"delta":{"content":%s%s'
                        % (self._head, answer.index, encode(answer.text), AFTER_TEXT)
                    )
            elif answer.text or answer.token_ids or answer.finish_reason is not None:
                delta = {"content": answer.text} if answer.text or answer.finish_reason is None else {}
                parts.append(self.form.event([self._choice({"delta": delta}, answer)]))
        return b"".join(parts)

    def end(self) -> bytes:
        """As `EventWriter.end`."""
        return self.form.last_event() + DONE

    def error(self, error: ApiError) -> bytes:
        """As `EventWriter.error`."""
        return error_event(error)

    def whole(self, outputs: list[RequestOutput]) -> bytes:
        """The response to a request that is not a stream."""
        (output,) = outputs
        self.form.note(0, output)
        choices = []
        for answer in sorted(output.outputs, key=lambda one: one.index):
            message: dict[str, Any] = {
                "role": self._role,
                "content": self._echoed + answer.text,
                "refusal": None,
                "reasoning": None,
            }
            reason = answer.finish_reason
            if self._plan is not None:
                events, reason = self._parse(self._plan, output, answer)
                message |= message_of(events)
                if self._echoed:
                    message["content"] = self._echoed + (message["content"] or "")
            choices.append({**self._choice({"message": message}, answer), "finish_reason": reason})
        extra: dict[str, Any] = {"prompt_logprobs": prompt_logprobs(output.prompt_logprobs)}
        if output.kv_transfer_params is not None:
            extra["kv_transfer_params"] = output.kv_transfer_params
        return self.form.whole(choices, {**extra, **self._prompt_extra(output)})

    def _parsed_events(self, plan: ParsingPlan, output: RequestOutput, answer: CompletionOutput) -> list[bytes]:
        """The events of one answer of `output`: what comes with its tokens is in the first, its end in the last."""
        events, reason = self._parse(plan, output, answer)
        deltas = [delta_of(event) for event in events]
        if not deltas:
            if reason is None and (self._is_plain or not answer.token_ids):
                return []
            deltas = [{}]
        choices: list[dict[str, Any]] = [
            {"index": answer.index, "delta": delta, "logprobs": None, "finish_reason": None} for delta in deltas
        ]
        choices[0] = {**self._choice({"delta": deltas[0]}, answer), "finish_reason": None, "stop_reason": None}
        choices[-1] |= {"finish_reason": reason, "stop_reason": answer.stop_reason}
        return [self.form.event([choice]) for choice in choices]

    def _parse(
        self, plan: ParsingPlan, output: RequestOutput, answer: CompletionOutput
    ) -> tuple[list[AnswerEvent], str | None]:
        """(events, reason of its end) of what is new in an answer; its tokens of thinking are counted."""
        parsed = self._parsed.get(answer.index)
        if parsed is None:
            parsed = self._parsed[answer.index] = plan.answer(output.prompt_token_ids)
        events = parsed.push(answer.text, answer.token_ids, is_end=answer.finish_reason is not None)
        self.form.usage.num_reasoning = sum(one.num_reasoning for one in self._parsed.values())
        return events, parsed.finish_reason(answer.finish_reason)

    def _start(self, index: int, output: RequestOutput) -> bytes:
        """The event that begins answer `index`."""
        extra = {} if self._started else {**self.form.first_extra(), **self._prompt_extra(output)}
        self._started.add(index)
        delta = {"role": self._role, "content": self._echoed}
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        return self.form.event([choice], extra)

    def _choice(self, content: dict[str, Any], answer: CompletionOutput) -> dict[str, Any]:
        logprobs = None
        if self._logprobs is not None:
            logprobs = self._logprobs.chat(answer.token_ids, answer.logprobs or [])
        choice = {
            "index": answer.index,
            **content,
            "logprobs": logprobs,
            "finish_reason": answer.finish_reason,
            "stop_reason": answer.stop_reason,
        }
        choice["token_ids"] = answer.token_ids if self._request.return_token_ids else None
        return choice

    def _prompt_extra(self, output: RequestOutput) -> dict[str, Any]:
        extra: dict[str, Any] = {
            "prompt_token_ids": output.prompt_token_ids if self._request.return_token_ids else None
        }
        if self._request.return_prompt_text:
            extra["prompt_text"] = output.prompt
        return extra
