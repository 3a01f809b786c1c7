"""Which drafts stand by block verification: the drafts of a row are judged together, so more of them stand.

Called by the sampling step where `rejection_sample_method` is "block". No state. All positions of a row are scored,
each with the drafts before it taken in; a draw per draft then says how many stand, and what was taken in behind these
is taken back.

Source: Sun et al. 2024, "Block verification accelerates speculative decoding", algorithm 2, whose tau is `num_kept`
and whose p_i is `scale`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from quire.core.logprobs import LogprobsArrays
from quire.sample.ragged import take_lines, to_device
from quire.sample.rejection_sampler import DraftedLines, block_acceptance, draw_excess, excess
from quire.sample.rng import STREAM_ACCEPT, attempt, uniform
from quire.sample.sampler import Sampler, Scored, as_lines
from quire.sample.states import FeatureFlag, SamplingStates
from quire.worker.draft_verification import Verified
from quire.worker.request_states import RequestStates

_LOGPROBS = int(FeatureFlag.LOGPROBS)


@dataclass(frozen=True, slots=True)
class DraftedRows:
    """Rows that sample, n of them, and the drafts of all their lines.

    Attributes:
        start_loc: [n + 1] int32; where each row's lines of logits begin: one, and one for each draft that is verified.
        rows: [n] int32, distinct.
        positions: [n] integers; index in its sequence of the first token to be sampled.
        drafted: a row's last line has a draft only where one was left out that may not be ignored.
    """

    start_loc: np.ndarray
    rows: np.ndarray
    positions: np.ndarray
    drafted: DraftedLines


@dataclass(frozen=True, slots=True)
class _Judged:
    """What was found out of each line ([num_logits, ...]) and row ([n]).

    Attributes:
        scores, token_ids: as `Scored` of every line that was looked at.
        is_invalid: [num_logits] bool.
        scale: [num_logits] float64.
        num_taken_in: [n] drafts that processors know.
        num_kept: [n] drafts that stand.
    """

    scores: torch.Tensor
    token_ids: np.ndarray
    is_invalid: np.ndarray
    scale: np.ndarray
    num_taken_in: np.ndarray
    num_kept: np.ndarray


class BlockVerification:
    """Samples rows with drafts.

    Args:
        sampler: scores lines of logits.
        states, requests: what is known of the rows; tokens are taken into both.
    """

    def __init__(self, sampler: Sampler, states: SamplingStates, requests: RequestStates) -> None:
        self._sampler = sampler
        self._states = states
        self._requests = requests

    def verify(self, logits: torch.Tensor, batch: DraftedRows) -> Verified:
        """Tokens of the rows, from [num_logits, vocab_size] logits."""
        logits = as_lines(logits)
        judged = self._judge(logits, batch)
        starts, rows = batch.start_loc[:-1], batch.rows
        num_before = np.minimum(judged.num_kept, np.diff(batch.start_loc) - 1)  # drafts before the row's last token
        last_lines = starts + num_before
        last_ids = self._last_tokens(judged, batch, last_lines)
        self._take_back(judged, batch, num_before)
        self._requests.append(rows, batch.positions + num_before, last_ids)
        self._states.append(rows, last_ids)

        start_loc = np.zeros_like(batch.start_loc)
        np.cumsum(num_before + 1, out=start_loc[1:])
        lines = np.arange(start_loc[-1]) + np.repeat(starts - start_loc[:-1], num_before + 1)
        token_ids = batch.drafted.token_ids[lines]
        token_ids[start_loc[1:] - 1] = last_ids
        invalid = np.flatnonzero(judged.is_invalid[last_lines])
        return Verified(
            token_ids,
            start_loc,
            self._logprobs(logits, judged, lines, np.repeat(rows, num_before + 1), token_ids),
            rows[invalid],
            (batch.positions + num_before)[invalid],
        )

    def _judge(self, logits: torch.Tensor, batch: DraftedRows) -> _Judged:
        """Score position after position, while there are drafts that may stand."""
        num_lines, num_rows = len(logits), len(batch.rows)
        judged = _Judged(
            scores=torch.empty_like(logits),
            token_ids=np.zeros(num_lines, dtype=np.int32),
            is_invalid=np.zeros(num_lines, dtype=np.bool_),
            scale=np.ones(num_lines),
            num_taken_in=np.zeros(num_rows, dtype=np.int64),
            num_kept=np.zeros(num_rows, dtype=np.int64),
        )
        entries, turn = np.arange(num_rows), 0
        while len(entries):
            lines, rows = batch.start_loc[entries] + turn, batch.rows[entries]
            scored = self._sampler.score(take_lines(logits, lines), rows, batch.positions[entries] + turn)
            judged.scores.index_copy_(0, to_device(lines.astype(np.int64), logits.device), scored.scores)
            judged.token_ids[lines], judged.is_invalid[lines] = scored.token_ids, scored.is_invalid
            goes_on = self._judge_turn(judged, batch, entries, turn, self._sampler.target_probs(scored, rows))
            goes_on &= ~scored.is_invalid
            entries = entries[goes_on]
            self._states.append(batch.rows[entries], batch.drafted.token_ids[lines[goes_on]])
            turn += 1
            judged.num_taken_in[entries] = turn
        return judged

    def _judge_turn(
        self, judged: _Judged, batch: DraftedRows, entries: np.ndarray, turn: int, probs: torch.Tensor
    ) -> np.ndarray:
        """Whether the `turn` drafts so far stand, by the p of the place behind them; [n] bool: look at one more."""
        lines = batch.start_loc[entries] + turn
        has_more = batch.start_loc[entries + 1] > lines + 1
        drafting = np.flatnonzero(batch.drafted.token_ids[lines] >= 0)
        chance, scale = judged.scale[lines], np.zeros(len(lines))
        chance[drafting], scale[drafting] = block_acceptance(
            take_lines(probs, drafting), judged.scale[lines[drafting]], batch.drafted.take(lines[drafting])
        )
        if turn:
            stands = self._chances(batch, entries, turn - 1) < chance
            judged.num_kept[entries[stands]] = turn
        ends = np.flatnonzero((scale > 0) & ~has_more)  # with a draft that has no logits behind it
        stands = self._chances(batch, entries[ends], turn) < scale[ends]
        judged.num_kept[entries[ends[stands]]] = turn + 1
        goes_on: np.ndarray = (scale > 0) & has_more
        judged.scale[lines[goes_on] + 1] = scale[goes_on]
        return goes_on

    def _chances(self, batch: DraftedRows, entries: np.ndarray, num_before: int) -> np.ndarray:
        """[n] float64: the random numbers of the drafts that have `num_before` ones before them."""
        seeds = self._states.seeds[batch.rows[entries]]
        streams = attempt(STREAM_ACCEPT, np.full(len(entries), num_before))
        return uniform(seeds, batch.positions[entries] + num_before, streams)

    def _last_tokens(self, judged: _Judged, batch: DraftedRows, last_lines: np.ndarray) -> np.ndarray:
        """[n] int32: behind the drafts that stand the token in the place of the next, or the bonus."""
        token_ids: np.ndarray = judged.token_ids[last_lines]
        drafts = batch.drafted.token_ids[last_lines]
        is_draft = judged.num_kept > last_lines - batch.start_loc[:-1]
        token_ids[is_draft] = drafts[is_draft]
        rejected = np.flatnonzero((drafts >= 0) & ~is_draft & ~judged.is_invalid[last_lines])
        if len(rejected):
            lines, rows = last_lines[rejected], batch.rows[rejected]
            scored = Scored(take_lines(judged.scores, lines), token_ids[rejected], judged.is_invalid[lines])
            probs = self._sampler.target_probs(scored, rows)
            weights = excess(probs, judged.scale[lines], batch.drafted.take(lines))
            positions = batch.positions[rejected] + lines - batch.start_loc[rejected]
            token_ids[rejected] = draw_excess(weights, token_ids[rejected], self._states.seeds[rows], positions)
        return token_ids

    def _take_back(self, judged: _Judged, batch: DraftedRows, num_before: np.ndarray) -> None:
        """Processors forget the drafts that do not stand."""
        is_ahead = (judged.num_taken_in > num_before) & self._states.follows_tokens(batch.rows)
        for entry in np.flatnonzero(is_ahead).tolist():
            row, num_tokens = int(batch.rows[entry]), int(batch.positions[entry] + num_before[entry])
            self._states.rewind(row, self._requests.token_ids[row, :num_tokens])

    def _logprobs(
        self, logits: torch.Tensor, judged: _Judged, lines: np.ndarray, rows: np.ndarray, token_ids: np.ndarray
    ) -> LogprobsArrays | None:
        """Of the tokens whose rows want them."""
        wanted = np.flatnonzero(self._states.flags[rows] & _LOGPROBS)
        if not len(wanted):
            return None
        scored = take_lines(logits if self._sampler.is_raw else judged.scores, lines[wanted])
        return self._sampler.gather_logprobs(scored, rows, token_ids, wanted)
