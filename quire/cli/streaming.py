"""One request's text as it comes, with its timings. Used by the commands that stream; no state but the timer's."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from quire.core.outputs import RequestOutput
from quire.core.sampling_params import RequestOutputKind, SamplingParams
from quire.engine.llm_engine import LLMEngine
from quire.entrypoints.interrupts import DeferredInterrupt
from quire.utils.progress_line import ProgressLine


@dataclass(slots=True)
class AnswerTimes:
    """Timings of one answer, in seconds since it was asked for; 0 = not yet."""

    num_tokens: int = 0
    first_token_s: float = 0.0
    last_token_s: float = 0.0
    finish_reason: str | None = None

    @property
    def tokens_per_s(self) -> float:
        """Speed of decoding: tokens after the first, over the time they took."""
        decode_s = self.last_token_s - self.first_token_s
        return (self.num_tokens - 1) / decode_s if self.num_tokens > 1 and decode_s > 0 else 0.0

    def __str__(self) -> str:
        speed = f"{self.tokens_per_s:.1f} tok/s, " if self.tokens_per_s else ""
        return f"{self.num_tokens} tokens, {speed}TTFT {self.first_token_s * 1e3:.0f} ms"


class AnswerStream:
    """Streams the answer to one prompt; iterate over it once.

    Ctrl-C ends the answer between two steps, not the program: the iteration stops and `times.finish_reason` is
    "abort".
    """

    _names = itertools.count()

    def __init__(self, engine: LLMEngine, prompt: Any, params: SamplingParams, *, add_special_tokens: bool) -> None:
        self._engine = engine
        self.times = AnswerTimes()
        streamed = params.clone()
        streamed.output_kind = RequestOutputKind.DELTA
        streamed.return_progress = True
        self._progress = ProgressLine("computing the prompt")
        self._start = time.perf_counter()
        self._name = engine.add_request(
            f"stream-{next(self._names)}", prompt, streamed, add_special_tokens=add_special_tokens
        )

    def __iter__(self) -> Iterator[str]:
        try:
            with DeferredInterrupt() as interrupt:
                while self.times.finish_reason is None:
                    for output in self._engine.step():
                        completion = output.outputs[0]
                        self._show_progress(output)
                        self._note(len(completion.token_ids), completion.finish_reason)
                        if completion.text:
                            yield completion.text
                    if interrupt.is_pending:
                        self.times.finish_reason = "abort"
        finally:
            self._progress.end()
            self._engine.discard_requests([self._name])

    def _show_progress(self, output: RequestOutput) -> None:
        if output.outputs[0].token_ids:
            self._progress.end()
        elif output.prompt_progress is not None:
            self._progress.show(output.prompt_progress.processed, output.prompt_progress.total)

    def _note(self, num_tokens: int, finish_reason: str | None) -> None:
        now = time.perf_counter() - self._start
        if num_tokens and not self.times.num_tokens:
            self.times.first_token_s = now
        self.times.last_token_s = now
        self.times.num_tokens += num_tokens
        self.times.finish_reason = finish_reason
