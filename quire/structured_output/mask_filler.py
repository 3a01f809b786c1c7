"""MaskFiller: writes the masks of a step's structured requests, on a thread beside the model.

Called and owned by the grammar manager. A request that has no token left, or whose library gives up, is reported, and
the others of the step are not held up by it. For a request with drafts the grammar is taken through them, one mask
behind each, and back; behind a draft that it does not take nothing will be sampled, so there is no mask.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from quire.core.grammar_bitmask import GrammarBitmask, allow, allow_only, allows, pack_mask
from quire.errors import QuireError, ValidationError
from quire.logger import get_logger
from quire.structured_output.answer import Answer
from quire.structured_output.interface import GrammarError, Vocabulary
from quire.structured_output.restrictions import empty_mask_error

logger = get_logger(__name__)


class Span(NamedTuple):
    """What a request samples in a step.

    Attributes:
        line: its first row of logits.
        drafts: one more row follows for each of these tokens.
    """

    line: int
    answer: Answer
    drafts: Sequence[int] = ()


class MaskFiller:
    """Fills masks.

    Args:
        vocabulary: of the model.
        report_failure: called, on the thread that fills, with a request that cannot go on and why.
    """

    def __init__(self, vocabulary: Vocabulary, report_failure: Callable[[Answer, QuireError], None]) -> None:
        self._eos_token_id = vocabulary.eos_token_id
        self._bitmask_size = vocabulary.bitmask_size
        self._last_word = _last_word(vocabulary.vocab_size)
        self._report_failure = report_failure
        self._thread = ThreadPoolExecutor(1, "grammar masks")

    def submit(self, spans: Sequence[Span]) -> Future[GrammarBitmask]:
        """Have `fill` called on the thread."""
        return self._thread.submit(self.fill, spans)

    def fill(self, spans: Sequence[Span]) -> GrammarBitmask:
        """The tokens that each row of logits allows."""
        bitmask = np.empty((sum(1 + len(span.drafts) for span in spans), self._bitmask_size), dtype=np.int32)
        lines, closed = list[int](), list[int]()
        for span in spans:
            if not span.answer.is_free:
                error = self._fill_row(span.answer, span.answer.output, bitmask, len(lines))
                lines.append(span.line)
                if error is not None:
                    self._report_failure(span.answer, error)
                    closed += range(span.line + 1, span.line + 1 + len(span.drafts))
                    continue
            if span.drafts:
                self._fill_behind_drafts(span, bitmask, lines, closed)
        made = np.array(lines, dtype=np.int32)
        return GrammarBitmask(made, bitmask[: len(lines)], np.array(closed, dtype=np.int32) if closed else None)

    def _fill_behind_drafts(self, span: Span, bitmask: np.ndarray, lines: list[int], closed: list[int]) -> None:
        """Go on to as many rows as there are right drafts; what is wrong there is reported when it is reached."""
        answer, end = span.answer, span.line + 1 + len(span.drafts)
        mask = None if answer.is_free else bitmask[len(lines) - 1]
        try:
            with answer.trying() as advance:
                for i, token_id in enumerate(span.drafts, start=1):
                    # The mask is asked first: some libraries write a warning about every token that they refuse.
                    if (mask is not None and not allows(mask, token_id)) or not advance(token_id):
                        closed += range(span.line + i, end)
                        break
                    mask = None if answer.is_free else bitmask[len(lines)]
                    if mask is None:
                        continue
                    output = [*answer.output, *span.drafts[:i]]
                    if self._fill_row(answer, output, bitmask, len(lines)) is not None:
                        closed += range(span.line + i, end)
                        break
                    lines.append(span.line + i)
        except Exception as error:  # a library's limits show themselves in many classes; the step must go on
            self._report_failure(answer, too_complex(answer, error))
            closed += range(span.line + 1, end)

    def close(self) -> None:
        """End the thread; harmless when repeated."""
        self._thread.shutdown(wait=True)

    def _fill_row(self, answer: Answer, output: list[int], bitmask: np.ndarray, row: int) -> QuireError | None:
        """What may come behind `output`; what is wrong where nothing may, or where the library gives up."""
        line = bitmask[row]
        if answer.is_terminated:  # only with ignore_eos: it ends again and again
            allow_only(line, self._eos_token_id)
        elif (error := self._try_fill(answer, bitmask, row)) is not None:
            return error
        if answer.end_ids and allows(line, self._eos_token_id):
            allow(line, answer.end_ids)
        if answer.restrictions is None:
            return None
        blamed = answer.restrictions.conflict(line, output)
        if blamed is None:
            return None
        line[:] = -1  # the token of this step is not taken
        return empty_mask_error(blamed, len(output))

    def _try_fill(self, answer: Answer, bitmask: np.ndarray, row: int) -> QuireError | None:
        """What the grammar allows; an error, with nothing allowed, when the library gives up."""
        try:
            start_s = time.thread_time()
            answer.fill(bitmask, row)
            answer.mask_s = time.thread_time() - start_s
            bitmask[row, -1] &= self._last_word
            if not bitmask[row].any():
                raise GrammarError("no token of the vocabulary comes next")
        except Exception as error:  # a library's limits show themselves in many classes; the step must go on
            logger.warning("request %s: %s: %s", answer.message.request_id, type(error).__name__, str(error)[:200])
            bitmask[row] = 0
            return too_complex(answer, error)
        return None


def too_complex(answer: Answer, error: Exception) -> QuireError:
    """The error of a request whose library gave up."""
    params = answer.message.sampling_params.structured_outputs
    assert params is not None, "only requests with a grammar have masks"
    return ValidationError(
        f"{params.backend} cannot advance the grammar further: {str(error)[:200]}",
        hint="use a simpler grammar", field=params.field,
    )  # fmt: skip


def _last_word(vocab_size: int) -> np.int32:
    """The last word of a mask that allows every id; libraries leave anything in the bits beyond."""
    word: np.int32 = pack_mask(np.arange(32) <= (vocab_size - 1) % 32)[0]
    return word
