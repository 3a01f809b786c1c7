"""Log-probabilities of one answer: arrays from the sampler into the values users read.

Owned by a `RequestState`. Owns what was collected so far.
"""

from __future__ import annotations

import numpy as np

from quire.core.logprobs import LogprobsArrays
from quire.core.outputs import Logprob
from quire.tokenization.tokenizer import Tokenizer

LogprobLine = dict[int, Logprob]


class LogprobsCollector:
    """Collects the lines of one answer and of its prompt.

    Args:
        tokenizer: writes `decoded_token`; None leaves it out.
        wants_output, wants_prompt: which of the two the request asked for.
    """

    __slots__ = ("_tokenizer", "cumulative", "output", "prompt")

    def __init__(self, tokenizer: Tokenizer | None, *, wants_output: bool, wants_prompt: bool) -> None:
        self._tokenizer = tokenizer
        self.output: list[LogprobLine] | None = [] if wants_output else None
        self.prompt: list[LogprobLine | None] | None = [None] if wants_prompt else None
        self.cumulative: float | None = 0.0 if wants_output else None

    def add_output(self, arrays: LogprobsArrays, line: int) -> None:
        """Take in the line of one new token."""
        if self.output is None or self.cumulative is None:
            return
        self.output.append(make_line(self._tokenizer, arrays, line))
        self.cumulative += float(arrays.logprobs[line, 0])

    def add_prompt(self, arrays: LogprobsArrays) -> None:
        """Take in lines of prompt positions, in order."""
        if self.prompt is not None:
            self.prompt.extend(make_line(self._tokenizer, arrays, line) for line in range(len(arrays.index)))

    def clear_prompt(self) -> None:
        """Forget the lines of the prompt: they will come again."""
        if self.prompt is not None:
            self.prompt = [None]


def make_line(tokenizer: Tokenizer | None, arrays: LogprobsArrays, line: int) -> LogprobLine:
    """Token id -> Logprob; the sampled (or prompt) token first, then falling or as named; padding left out."""
    columns = zip(
        arrays.token_ids[line].tolist(), arrays.logprobs[line].tolist(), arrays.ranks[line].tolist(), strict=True
    )
    return {
        token_id: Logprob(logprob, rank or None, tokenizer.token_text(token_id) if tokenizer else None)
        for token_id, logprob, rank in columns
        if token_id >= 0
    }


def lines_by_entry(arrays: LogprobsArrays | None) -> dict[int, int]:
    """Entry of the step -> its line in `arrays`."""
    if arrays is None:
        return {}
    return {int(entry): line for line, entry in enumerate(np.asarray(arrays.index).tolist())}
