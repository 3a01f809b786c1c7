"""OutputStream: one request's outputs on their way to a reader that may be slow. Owned by `AsyncLLM`.

Outputs that were not read yet are merged: deltas are joined, whole answers replaced by newer ones. So a slow reader
costs no more memory than the answer has, and loses nothing.
"""

from __future__ import annotations

import asyncio

from quire.core.outputs import CompletionOutput, RequestOutput


class OutputStream:
    """A place for one merged output, or the error that ended the request.

    Args:
        is_delta: outputs hold what is new, not all there is.
    """

    def __init__(self, *, is_delta: bool) -> None:
        self._is_delta = is_delta
        self._output: RequestOutput | None = None
        self._error: BaseException | None = None
        self._is_ready = asyncio.Event()

    def put(self, output: RequestOutput) -> None:
        """The next output."""
        if self._output is not None and self._is_delta:
            output = merge_deltas(self._output, output)
        self._output = output
        self._is_ready.set()

    def fail(self, error: BaseException) -> None:
        """The request failed; outputs that were not read yet are dropped."""
        self._error = error
        self._is_ready.set()

    async def get(self) -> RequestOutput:
        """What has come since the last call; waits for it. Raises the error that the request failed with."""
        await self._is_ready.wait()
        if self._error is not None:
            raise self._error
        output, self._output = self._output, None
        assert output is not None, "the event is set by put and fail alone"
        self._is_ready.clear()
        return output


def merge_deltas(older: RequestOutput, newer: RequestOutput) -> RequestOutput:
    """Both as one output; changes `newer`."""
    answers = {answer.index: answer for answer in older.outputs}
    for answer in newer.outputs:
        before = answers.get(answer.index)
        answers[answer.index] = answer if before is None else _merge_answers(before, answer)
    newer.outputs = [answers[index] for index in sorted(answers)]
    newer.prompt_logprobs = older.prompt_logprobs if newer.prompt_logprobs is None else newer.prompt_logprobs
    return newer


def _merge_answers(older: CompletionOutput, newer: CompletionOutput) -> CompletionOutput:
    newer.text = older.text + newer.text
    newer.token_ids = older.token_ids + newer.token_ids
    if older.logprobs is not None:
        newer.logprobs = older.logprobs + (newer.logprobs or [])
    return newer
