"""The search of one prompt's beams: which continuations live on, which are finished, when it is over.

Used by `scheduler.beam_groups`. Owns scores and finished sequences; knows no rows and no blocks. The order of events,
the scores and the three ways to stop are those of `transformers` (`generate(num_beams=k, do_sample=False)`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from quire.core.beam_search import BeamSpec, num_top_tokens, sequence_score


@dataclass(frozen=True, slots=True)
class Finished:
    """A finished sequence: its new tokens, score, sum of log-probabilities, and whether an end token ended it."""

    score: float
    cum_logprob: float
    token_ids: np.ndarray
    is_stopped: bool


class Continuation(NamedTuple):
    """The beams of the next step: beam i continues beam `parents[i]` with `token_ids[i]`; both are [num_beams]."""

    parents: np.ndarray
    token_ids: np.ndarray


class BeamSearch:
    """`num_beams` sequences that grow together.

    Args:
        spec: scores, and when to stop.
        max_tokens: new tokens of a sequence that is not ended by an end token.
        end_token_ids: end a sequence.

    Attributes:
        finished: at most `num_beams`, the best first; as many once the search is over.
    """

    def __init__(self, spec: BeamSpec, max_tokens: int, end_token_ids: frozenset[int]) -> None:
        self._spec = spec
        self._num_beams = num_beams = spec.num_beams
        self._max_tokens = max_tokens
        self._end_ids = np.array(sorted(end_token_ids), dtype=np.int32)
        self._num_tokens = 0
        self._can_improve = True
        # All beams begin alike: only the first one counts.
        self._scores = np.full(num_beams, -np.inf)
        self._scores[0] = 0.0
        self.finished: list[Finished] = []

    def advance(
        self, token_ids: np.ndarray, logprobs: np.ndarray, tokens_of: Callable[[int], np.ndarray]
    ) -> Continuation | None:
        """One step of all beams; None when the search is over.

        Args:
            token_ids: [num_beams, num_top] int32; each beam's likeliest tokens, at least `num_top_tokens` of them.
            logprobs: the same shape; natural logarithms.
            tokens_of: beam -> its new tokens so far.
        """
        num_beams, num_top = token_ids.shape
        totals = (self._scores[:, None] + logprobs.astype(np.float64)).ravel()
        order = np.argsort(-totals, kind="stable")[: num_top_tokens(num_beams, len(self._end_ids))]
        parents, tokens, totals = order // num_top, token_ids.ravel()[order], totals[order]
        self._num_tokens += 1
        is_last = self._num_tokens >= self._max_tokens
        is_end = np.isin(tokens, self._end_ids)
        for i in np.flatnonzero((is_end | is_last)[:num_beams]).tolist():
            self._add_finished(
                float(totals[i]), np.append(tokens_of(int(parents[i])), tokens[i]).astype(np.int32), bool(is_end[i])
            )
        self.finished = sorted(self.finished, key=lambda one: -one.score)[:num_beams]
        if is_last:
            return None
        live = np.flatnonzero(~is_end)[:num_beams]
        self._scores = totals[live]
        self._can_improve = self._can_improve and self._may_beat_the_worst(float(self._scores[0]))
        if not self._can_improve or (self._spec.early_stopping is True and self._is_full):
            return None
        return Continuation(parents[live], tokens[live])

    def reorder(self, order: list[int]) -> None:
        """Number the beams anew: beam i is the one that `advance` called continuation `order[i]`."""
        self._scores = self._scores[order]

    @property
    def _is_full(self) -> bool:
        return len(self.finished) == self._num_beams

    def _add_finished(self, cum_logprob: float, token_ids: np.ndarray, is_stopped: bool) -> None:
        score = sequence_score(cum_logprob, len(token_ids), self._spec.length_penalty)
        self.finished.append(Finished(score, cum_logprob, token_ids, is_stopped))

    def _may_beat_the_worst(self, best_running: float) -> bool:
        """Whether the best running sequence is, or can become, better than the worst finished one."""
        if not self._is_full:
            return True
        length = self._num_tokens
        if self._spec.early_stopping == "never" and self._spec.length_penalty > 0:
            length = self._max_tokens
        return sequence_score(best_running, length, self._spec.length_penalty) > self.finished[-1].score
