"""The answers of /v1/chat/completions, whole and as a stream. Owns the state of one response."""

from __future__ import annotations

from typing import Any

from quire.core.outputs import CompletionOutput, RequestOutput
from quire.entrypoints.openai.answer import AnswerForm, encode
from quire.entrypoints.openai.logprobs import LogprobsFormat, prompt_logprobs
from quire.entrypoints.openai.protocol.chat import ChatRequest
from quire.entrypoints.openai.sse import DONE

AFTER_TEXT = b'},"logprobs":null,"finish_reason":null}]}\n\n'


class ChatWriter:
    """Writes chat answers.

    Args:
        form: what is around them.
        request: as it came.
        role: of the answers.
        echoed: what each answer begins with; "" unless the last message is echoed.
    """

    def __init__(self, form: AnswerForm, request: ChatRequest, role: str, echoed: str = "") -> None:
        self.form = form
        self._request = request
        self._role = role
        self._echoed = echoed
        self._started: set[int] = set()
        self._head = form.event_head()
        self._logprobs = None
        if request.logprobs:
            self._logprobs = LogprobsFormat(form.tokenizer, request.top_logprobs or 0, as_ids=form.shows_ids)
        self._is_plain = self._logprobs is None and not request.return_token_ids and not form.shows_usage_always

    def events(self, prompt_index: int, output: RequestOutput) -> bytes:
        """As `EventWriter.events`."""
        parts = []
        if not self._started:
            parts = [self._start(index, output) for index in range(self.form.work.params.n)]
        self.form.note(prompt_index, output)
        for answer in output.outputs:
            if self._is_plain and answer.finish_reason is None:
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
                "tool_calls": [],
            }
            choices.append(self._choice({"message": message}, answer))
        extra: dict[str, Any] = {"prompt_logprobs": prompt_logprobs(output.prompt_logprobs)}
        return self.form.whole(choices, {**extra, **self._prompt_extra(output)})

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
        if self._request.return_token_ids:
            choice["token_ids"] = answer.token_ids
        return choice

    def _prompt_extra(self, output: RequestOutput) -> dict[str, Any]:
        extra: dict[str, Any] = {}
        if self._request.return_token_ids:
            extra["prompt_token_ids"] = output.prompt_token_ids
        if self._request.return_prompt_text:
            extra["prompt_text"] = output.prompt
        return extra
