"""OutputStream: one request's outputs on their way to a reader that may be slow. Made by an `EngineClient`.

The engine puts outputs in and calls `on_ready` at once, within the step that made them; the reader takes them then, or
later. What it does not take yet is merged: deltas are joined, whole answers replaced by newer ones. So a quick reader
costs no task and no queue, and a slow one no more memory than the answer has.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from quire.core.outputs import CompletionOutput, RequestOutput
from quire.engine.live_request import LiveRequest


def noop() -> None:
    """Do nothing: the callback of a stream without a reader."""


class OutputStream:
    """A place for one merged output, or the error that ended the request. Used on one event loop.

    Args:
        is_delta: outputs hold what is new, not all there is.
        on_close: called when the reader leaves.

    Attributes:
        placed: the request as its supervisor has it, whatever became of it; None = there is none.
        on_ready: called when `take` has something again; quick, raises nothing.
    """

    __slots__ = ("_error", "_is_delta", "_on_close", "_output", "on_ready", "placed")

    def __init__(self, *, is_delta: bool, on_close: Callable[[], None] = noop) -> None:
        self._is_delta = is_delta
        self._on_close = on_close
        self._output: RequestOutput | None = None
        self._error: BaseException | None = None
        self.on_ready: Callable[[], None] = noop
        self.placed: LiveRequest | None = None

    @property
    def is_ready(self) -> bool:
        """True when `take` has something."""
        return self._output is not None or self._error is not None

    def put(self, output: RequestOutput) -> None:
        """The next output."""
        if self._output is None:
            self._output = output
            self.on_ready()
        else:
            self._output = merge_deltas(self._output, output) if self._is_delta else output

    def fail(self, error: BaseException) -> None:
        """The request failed; outputs that were not read yet are dropped."""
        was_ready, self._error = self.is_ready, error
        if not was_ready:
            self.on_ready()

    def take(self) -> RequestOutput | None:
        """What has come since the last call, None when nothing has. Raises the error that the request failed with."""
        if self._error is not None:
            raise self._error
        output, self._output = self._output, None
        return output

    async def get(self) -> RequestOutput:
        """As `take`, but waits until there is something."""
        output = self.take()
        while output is None:
            await until_ready(self)
            output = self.take()
        return output

    def close(self) -> None:
        """The reader leaves: a running request ends, nothing is reported any more. Harmless when repeated."""
        self.on_ready = noop
        on_close, self._on_close = self._on_close, noop
        on_close()


class Source(Protocol):
    """Says when it has something."""

    on_ready: Callable[[], None]


async def until_ready(source: Source) -> None:
    """Wait for the next call of `source.on_ready`."""
    waiting = asyncio.get_running_loop().create_future()

    def wake() -> None:
        if not waiting.done():
            waiting.set_result(None)

    source.on_ready = wake
    try:
        await waiting
    finally:
        source.on_ready = noop


def merge_deltas(older: RequestOutput, newer: RequestOutput) -> RequestOutput:
    """Both as one output; changes `newer`."""
    answers = {answer.index: answer for answer in older.outputs}
    for answer in newer.outputs:
        before = answers.get(answer.index)
        answers[answer.index] = answer if before is None else _merge_answers(before, answer)
    newer.outputs = [answers[index] for index in sorted(answers)]
    newer.prompt_progress = newer.prompt_progress or older.prompt_progress
    newer.prompt_logprobs = older.prompt_logprobs if newer.prompt_logprobs is None else newer.prompt_logprobs
    return newer


def _merge_answers(older: CompletionOutput, newer: CompletionOutput) -> CompletionOutput:
    newer.text = older.text + newer.text
    newer.token_ids = older.token_ids + newer.token_ids
    if older.logprobs is not None:
        newer.logprobs = older.logprobs + (newer.logprobs or [])
    return newer
