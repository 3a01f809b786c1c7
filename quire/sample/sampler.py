"""Sampler: one token per row of logits, in one vectorised pass.

Called by the worker's sampling step. Holds references only; per-row state is in `SamplingStates`. Whatever else is
in the batch, a row's token and log-probabilities are the same bits: every operation works line by line, and the
random numbers depend on (request seed, position) alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from quire.core.logprobs import LogprobsArrays
from quire.sample.logprobs import with_named_tokens
from quire.sample.ops.interface import SamplingOps
from quire.sample.ragged import take_lines
from quire.sample.states import FeatureFlag, SamplingStates

# Plain integers: operators of flag types cost as much as a small array's.
_LOGPROBS = int(FeatureFlag.LOGPROBS)
_NONE = np.empty(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """Tokens of one step.

    Attributes:
        token_ids: [n] int32, always inside the vocabulary.
        logprobs: lines for the entries that asked for them; None when none did.
        is_invalid: [n] bool; the logits were NaN or infinite, or no token was possible: the id means nothing and
            the request must end with an error.
    """

    token_ids: np.ndarray
    logprobs: LogprobsArrays | None
    is_invalid: np.ndarray


class Sampler:
    """Chooses tokens.

    Args:
        states: per-row parameters.
        ops: of the device that the logits are on.
        logprobs_mode: what log-probability fields hold: raw_ or processed_, then logprobs or logits.
    """

    def __init__(self, states: SamplingStates, ops: SamplingOps, logprobs_mode: str = "raw_logprobs") -> None:
        self._states = states
        self._ops = ops
        self._logprobs_mode = logprobs_mode
        self._is_raw = logprobs_mode.startswith("raw_")
        self._chooser = ops.make_chooser(states)

    def sample(self, logits: torch.Tensor, rows: np.ndarray, positions: np.ndarray) -> SamplerOutput:
        """Choose a token for each line.

        The order: snapshot for raw log-probabilities, float32, allowed ids, bad words, min tokens, logit bias,
        custom processors, penalties; the argmax; then for random rows temperature, custom processors that keep the
        argmax, min-p, top-k, top-p, and a draw.

        Args:
            logits: [n, vocab_size]; overwritten.
            rows: [n] int32, distinct.
            positions: [n] integers; index in its sequence of the token to be chosen.

        Raises:
            EngineGenerateError: a custom processor raised.
        """
        flags = self._states.flags[rows]
        needs = int(np.bitwise_or.reduce(flags, initial=0))
        wanted = np.flatnonzero(flags & _LOGPROBS) if needs & _LOGPROBS else _NONE
        logits = logits.float()
        if logits.stride(1) != 1:
            logits = logits.contiguous()
        has_processor = self._states.has_processor(needs)
        is_changed = has_processor or self._chooser.changes_logits
        scored = take_lines(logits, wanted) if len(wanted) and self._is_raw and is_changed else None
        if has_processor:
            logits = self._states.apply_argmax_changing(logits, rows)
        shown = _NONE if self._is_raw else wanted
        token_ids, is_invalid = self._chooser.choose(logits, rows, positions, flags, shown)
        if not len(wanted):
            return SamplerOutput(token_ids, None, is_invalid)
        if scored is None:
            scored = logits if len(wanted) == len(logits) else take_lines(logits, wanted)
        num_top = self._states.num_logprobs[rows[wanted]]
        lines = self._ops.gather_logprobs(scored, token_ids[wanted], num_top, wanted, self._logprobs_mode)
        if self._states.logprob_token_ids:
            by_row = self._states.logprob_token_ids
            named = {line: by_row[row] for line, row in enumerate(rows[wanted].tolist()) if row in by_row}
            lines = with_named_tokens(lines, scored, named) if named else lines
        return SamplerOutput(token_ids, lines, is_invalid)
