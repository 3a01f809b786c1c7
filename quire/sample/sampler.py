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
from quire.sample.ragged import take_lines, to_device
from quire.sample.rejection_sampler import AcceptanceRule, DraftedLines
from quire.sample.states import FeatureFlag, SamplingStates

# Plain integers: operators of flag types cost as much as a small array's.
_LOGPROBS = int(FeatureFlag.LOGPROBS)
_RANDOM = int(FeatureFlag.RANDOM)
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


@dataclass(frozen=True, slots=True)
class Scored:
    """What tokens are drawn from.

    Attributes:
        scores: [n, vocab_size] float32; of random rows after temperature and filters, with -inf for dropped tokens.
        token_ids, is_invalid: as in `SamplerOutput`.
    """

    scores: torch.Tensor
    token_ids: np.ndarray
    is_invalid: np.ndarray


class Sampler:
    """Chooses tokens.

    Args:
        states: per-row parameters.
        ops: of the device that the logits are on.
        logprobs_mode: what log-probability fields hold: raw_ or processed_, then logprobs or logits.
        rule: decides on drafts that `sample` is given.
    """

    def __init__(
        self,
        states: SamplingStates,
        ops: SamplingOps,
        logprobs_mode: str = "raw_logprobs",
        rule: AcceptanceRule | None = None,
    ) -> None:
        self._states = states
        self._ops = ops
        self._logprobs_mode = logprobs_mode
        self.is_raw = logprobs_mode.startswith("raw_")
        self._chooser = ops.make_chooser(states)
        self._rule = rule

    def sample(
        self, logits: torch.Tensor, rows: np.ndarray, positions: np.ndarray, drafted: DraftedLines | None = None
    ) -> SamplerOutput:
        """Choose a token for each line.

        The order: snapshot for raw log-probabilities, float32, allowed ids, bad words, min tokens, logit bias,
        custom processors, penalties; the argmax; then for random rows temperature, custom processors that keep the
        argmax, min-p, top-k, top-p, and a draw.

        Args:
            logits: [n, vocab_size]; overwritten.
            rows: [n] int32; those that have processors are distinct.
            positions: [n] integers; index in its sequence of the token to be chosen.
            drafted: on which the sampler's rule decides, for random rows; None = there is no rule.

        Raises:
            EngineGenerateError: a custom processor raised.
        """
        flags = self._states.flags[rows]
        needs = int(np.bitwise_or.reduce(flags, initial=0))
        wanted = np.flatnonzero(flags & _LOGPROBS) if needs & _LOGPROBS else _NONE
        logits = as_lines(logits)
        has_processor = self._states.has_processor(needs)
        is_changed = has_processor or self._chooser.changes_logits or drafted is not None
        raw = take_lines(logits, wanted) if len(wanted) and self.is_raw and is_changed else None
        if has_processor:
            logits = self._states.apply_argmax_changing(logits, rows)
        if drafted is None:
            shown = _NONE if self.is_raw else wanted
            token_ids, is_invalid = self._chooser.choose(logits, rows, positions, flags, shown)
        else:
            token_ids, is_invalid = self._decide(logits, rows, positions, drafted)
        if not len(wanted):
            return SamplerOutput(token_ids, None, is_invalid)
        if raw is None:
            raw = logits if len(wanted) == len(logits) else take_lines(logits, wanted)
        return SamplerOutput(token_ids, self.gather_logprobs(raw, rows, token_ids, wanted), is_invalid)

    def score(self, logits: torch.Tensor, rows: np.ndarray, positions: np.ndarray) -> Scored:
        """What `sample` would draw from, and the token that it would choose; arguments as there."""
        logits = as_lines(logits)
        flags = self._states.flags[rows]
        if self._states.has_processor(int(np.bitwise_or.reduce(flags, initial=0))):
            logits = self._states.apply_argmax_changing(logits, rows)
        token_ids, is_invalid = self._chooser.choose(logits, rows, positions, flags, np.arange(len(rows)))
        return Scored(logits, token_ids, is_invalid)

    def target_probs(self, scored: Scored, rows: np.ndarray) -> torch.Tensor:
        """[n, vocab_size] float32; the distribution of each line's token, of greedy rows all on the likeliest."""
        probs = torch.softmax(scored.scores, dim=-1)
        greedy = np.flatnonzero((self._states.flags[rows] & _RANDOM) == 0)
        if len(greedy):
            lines = to_device(greedy, probs.device)
            ids = to_device(scored.token_ids[greedy].astype(np.int64), probs.device)
            probs[lines] = torch.nn.functional.one_hot(ids, probs.shape[1]).float()
        return probs

    def gather_logprobs(
        self, scored: torch.Tensor, rows: np.ndarray, token_ids: np.ndarray, wanted: np.ndarray
    ) -> LogprobsArrays:
        """Lines for the `wanted` of n entries of these rows and tokens; `scored`: [num_wanted, vocab_size] float32."""
        num_top = self._states.num_logprobs[rows[wanted]]
        lines = self._ops.gather_logprobs(scored, token_ids[wanted], num_top, wanted, self._logprobs_mode)
        if self._states.logprob_token_ids:
            by_row = self._states.logprob_token_ids
            named = {line: by_row[row] for line, row in enumerate(rows[wanted].tolist()) if row in by_row}
            lines = with_named_tokens(lines, scored, named) if named else lines
        return lines

    def _decide(
        self, logits: torch.Tensor, rows: np.ndarray, positions: np.ndarray, drafted: DraftedLines
    ) -> tuple[np.ndarray, np.ndarray]:
        """As the chooser's `choose`, where drafts stand by the rule; greedy rows and lines without draft as ever."""
        assert self._rule is not None, "drafts are given where there is a rule"
        flags = self._states.flags[rows]
        token_ids, is_invalid = self._chooser.choose(logits, rows, positions, flags, np.arange(len(rows)))
        lines = np.flatnonzero(((flags & _RANDOM) != 0) & (drafted.token_ids >= 0) & ~is_invalid)
        if len(lines):
            probs = torch.softmax(take_lines(logits, lines), dim=-1)
            seeds = self._states.seeds[rows[lines]]
            token_ids[lines] = self._rule.choose(probs, token_ids[lines], drafted.take(lines), seeds, positions[lines])
        return token_ids, is_invalid


def as_lines(logits: torch.Tensor) -> torch.Tensor:
    """[n, vocab_size] float32 with adjacent columns; itself where it is."""
    logits = logits.float()
    return logits if logits.stride(1) == 1 else logits.contiguous()
