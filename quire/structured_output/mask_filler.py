"""MaskFiller: writes the masks of a step's structured requests, on a thread beside the model.

Called and owned by the grammar manager. A request that has no token left, or whose library gives up, is reported, and
the others of the step are not held up by it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from quire.core.grammar_bitmask import GrammarBitmask, allow, allow_only, allows, pack_mask
from quire.errors import QuireError, ValidationError
from quire.logger import get_logger
from quire.structured_output.answer import Answer
from quire.structured_output.interface import GrammarError, Vocabulary
from quire.structured_output.restrictions import empty_mask_error

logger = get_logger(__name__)

Lines = Sequence[tuple[int, Answer]]
"""(position among the rows that sample in the step, what is sampled there); a request may have several lines."""


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

    def submit(self, lines: Lines) -> Future[GrammarBitmask]:
        """Have `fill` called on the thread."""
        return self._thread.submit(self.fill, lines)

    def fill(self, lines: Lines) -> GrammarBitmask:
        """The tokens that each line allows."""
        bitmask = np.empty((len(lines), self._bitmask_size), dtype=np.int32)
        for row, (_, answer) in enumerate(lines):
            self._fill_row(answer, bitmask, row)
        return GrammarBitmask(np.array([line for line, _ in lines], dtype=np.int32), bitmask)

    def close(self) -> None:
        """End the thread; harmless when repeated."""
        self._thread.shutdown(wait=True)

    def _fill_row(self, answer: Answer, bitmask: np.ndarray, row: int) -> None:
        line = bitmask[row]
        if answer.is_terminated:  # only with ignore_eos: it ends again and again
            allow_only(line, self._eos_token_id)
        elif not self._try_fill(answer, bitmask, row):
            return
        if answer.end_ids and allows(line, self._eos_token_id):
            allow(line, answer.end_ids)
        if answer.restrictions is None:
            return
        blamed = answer.restrictions.conflict(line, answer.output)
        if blamed is not None:
            line[:] = -1  # the token of this step is not taken
            self._report_failure(answer, empty_mask_error(blamed, len(answer.output)))

    def _try_fill(self, answer: Answer, bitmask: np.ndarray, row: int) -> bool:
        """What the grammar allows; False, with nothing allowed and the request reported, when the library gives up."""
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
            self._report_failure(answer, too_complex(answer, error))
            return False
        return True


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
