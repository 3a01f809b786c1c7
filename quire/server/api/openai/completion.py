"""The answers of /v1/completions, whole and as a stream. Owns the state of one response."""

from __future__ import annotations

from typing import Any

from quire.core.outputs import CompletionOutput, RequestOutput
from quire.server.api.openai.protocol.completion import CompletionRequest
from quire.server.chat.answer import AnswerEnvelope, encode
from quire.server.chat.counts import AnswerCounts
from quire.server.chat.logprobs import Line, LogprobsFormat, prompt_logprobs
from quire.server.chat.sse import DONE, error_event
from quire.server.http.errors import ApiError

AFTER_TEXT = b',"logprobs":null,"finish_reason":null,"stop_reason":null,"token_ids":null,"prompt_token_ids":null}]}\n\n'


class CompletionWriter:
    """Writes completions; the answer `i` of prompt `p` is choice `p * n + i`.

    Args:
        form: what is around them.
        request: as it came.
        echoed: text of each prompt; None unless it is echoed.
    """

    def __init__(self, form: AnswerEnvelope, request: CompletionRequest, echoed: list[str] | None) -> None:
        self.form = form
        self._request = request
        self._echoed = echoed
        self._n = form.work.params.n
        self._hides_answer = request.max_tokens == 0
        self._offsets: dict[int, int] = {}
        self._prompt_lines: dict[int, list[Line | None]] = {}
        self._started: set[int] = set()
        self._head = form.event_head()
        self._logprobs = None
        if request.logprobs is not None or request.logprob_token_ids is not None:
            self._logprobs = LogprobsFormat(
                form.tokenizer, request.logprobs or 0, as_ids=form.shows_ids, named=request.logprob_token_ids
            )
        self._is_plain = (
            self._logprobs is None and not request.return_token_ids and not form.shows_usage_always
        ) and not self._hides_answer

    @property
    def counts(self) -> AnswerCounts:
        """As `EventWriter.counts`."""
        return self.form

    def events(self, prompt_index: int, output: RequestOutput) -> bytes:
        """As `EventWriter.events`."""
        if self._hides_answer:
            _hide(output)
        self.form.note(prompt_index, output)
        parts = []
        if output.prompt_progress is not None:
            choice = {"index": prompt_index * self._n, "text": ""}
            parts.append(self.form.progress_event(choice, output.prompt_progress))
        for answer in output.outputs:
            index = prompt_index * self._n + answer.index
            if self._is_plain and answer.finish_reason is None and index in self._started:
                if answer.text:
                    parts.append(b'%s{"index":%d,"text":%s%s' % (self._head, index, encode(answer.text), AFTER_TEXT))
            elif answer.text or answer.token_ids or answer.finish_reason is not None:
                is_very_first = not self._started
                choice = self._choice(prompt_index, output, answer)
                parts.append(self.form.event([choice], self.form.first_extra() if is_very_first else None))
        return b"".join(parts)

    def end(self) -> bytes:
        """As `EventWriter.end`."""
        return self.form.last_event() + DONE

    def error(self, error: ApiError) -> bytes:
        """As `EventWriter.error`."""
        return error_event(error)

    def whole(self, outputs: list[RequestOutput]) -> bytes:
        """The response to a request that is not a stream."""
        choices: list[dict[str, Any]] = []
        for prompt_index, output in enumerate(outputs):
            if self._hides_answer:
                _hide(output)
            self.form.note(prompt_index, output)
            answers = sorted(output.outputs, key=lambda one: one.index)
            choices += [self._choice(prompt_index, output, answer) for answer in answers]
        params = next((one.kv_transfer_params for one in outputs if one.kv_transfer_params is not None), None)
        return self.form.whole(choices, {} if params is None else {"kv_transfer_params": params})

    def _choice(self, prompt_index: int, output: RequestOutput, answer: CompletionOutput) -> dict[str, Any]:
        index = prompt_index * self._n + answer.index
        is_first = index not in self._started
        self._started.add(index)
        before = self._echoed[prompt_index] if self._echoed is not None and is_first else ""
        choice: dict[str, Any] = {
            "index": index,
            "text": before + answer.text,
            "logprobs": self._choice_logprobs(index, output, answer, is_first=is_first),
            "finish_reason": answer.finish_reason,
            "stop_reason": answer.stop_reason,
        }
        if not self._request.stream:
            choice["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs)
        shows_ids = bool(self._request.return_token_ids)
        choice["token_ids"] = answer.token_ids if shows_ids else None
        choice["prompt_token_ids"] = output.prompt_token_ids if shows_ids and is_first else None
        if self._request.return_prompt_text and is_first:
            choice["prompt_text"] = output.prompt
        return choice

    def _choice_logprobs(
        self, index: int, output: RequestOutput, answer: CompletionOutput, *, is_first: bool
    ) -> dict[str, Any] | None:
        if self._logprobs is None:
            return None
        token_ids, lines = list(answer.token_ids), list(answer.logprobs or [])
        if self._echoed is not None and is_first:
            token_ids = [*output.prompt_token_ids, *token_ids]
            lines = [*self._lines_of_prompt(index // self._n, output), *lines]  # type: ignore[list-item]
        content, self._offsets[index] = self._logprobs.completion(token_ids, lines, self._offsets.get(index, 0))
        return content

    def _lines_of_prompt(self, prompt_index: int, output: RequestOutput) -> list[Line | None]:
        """Of a stream, they come with its first output alone, and every answer's echo shows them."""
        if output.prompt_logprobs:
            self._prompt_lines[prompt_index] = output.prompt_logprobs
        return self._prompt_lines.get(prompt_index) or [None] * len(output.prompt_token_ids)


def _hide(output: RequestOutput) -> None:
    """Leave out the one token that was made for a request of none."""
    for answer in output.outputs:
        answer.text, answer.token_ids = "", []
        answer.logprobs = None if answer.logprobs is None else []
