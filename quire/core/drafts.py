"""Drafts: guesses at the next tokens of sequences, which the model then verifies, several at once.

What proposers and the controller of drafts exchange with the scheduler (`scheduler.drafts`), which calls both. A guess
changes no answer: a draft stands only where it is the token that would have been sampled.

Example: tokens are often repeated, so propose the last three again:

    class Again:
        name = "again"

        def propose(self, rows):
            drafts = [ids[:num][-3:] for ids, num in zip(rows.token_ids[rows.rows], rows.num_tokens)]
            return make_proposals([ids[:most] for ids, most in zip(drafts, rows.max_tokens)])

        def begin(self, request): ...
        def end(self, handle, token_ids, num_prompt_tokens): ...
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from quire.config.speculative import MAX_TOKENS
from quire.core.engine_messages import EngineCoreRequest

DRAFTS_PER_REQUEST = 2
"""Drafts that a step has room for, per request that may run: where many run, long drafts are for few of them."""


def most_drafts(max_num_seqs: int, asked: int | None = None) -> int:
    """Drafts that a step has room for: memory for their logits is planned by this.

    Args:
        asked: `SpeculativeConfig.max_step_draft_tokens`; None = those of one request at least.
    """
    return max(MAX_TOKENS, DRAFTS_PER_REQUEST * max_num_seqs) if asked is None else asked


@dataclass(frozen=True, slots=True)
class DraftRows:
    """Rows that may get drafts in the step that is planned; the newest token of each is known.

    Attributes:
        rows: [num_rows] intp.
        handles: [num_rows] int64; of their requests, never used again. A row is, for other requests.
        num_tokens: [num_rows] int32; prompt and output so far.
        max_tokens: [num_rows] int32, each >= 1; most drafts of the row.
        token_ids: [max_num_seqs, max_model_len] int32; row r has token_ids[r, :num_tokens]. Not to be written.
    """

    rows: np.ndarray
    handles: np.ndarray
    num_tokens: np.ndarray
    max_tokens: np.ndarray
    token_ids: np.ndarray


@dataclass(frozen=True, slots=True)
class Proposals:
    """Drafts of some rows, in the order in which these were asked for.

    Attributes:
        counts: [num_rows] int32; at most `DraftRows.max_tokens`, perhaps 0.
        token_ids: [sum of counts] int32.
        scores: [sum of counts] float32, 0 to 1; how likely each stands, given that those before it in its row do.
        sources: [num_rows] int32; which of several chained proposers the row's drafts are of.
        match_lengths: [num_rows] int32; tokens of the history that matched; 0 = nothing was looked for.
    """

    counts: np.ndarray
    token_ids: np.ndarray
    scores: np.ndarray
    sources: np.ndarray
    match_lengths: np.ndarray


def make_proposals(drafts: Sequence[np.ndarray], score: float = 1.0) -> Proposals:
    """Proposals from the drafts of each row, all with the same score; for proposers that go row by row."""
    counts = np.array([len(ids) for ids in drafts], dtype=np.int32)
    token_ids = np.concatenate([np.empty(0, dtype=np.int32), *drafts]).astype(np.int32)
    zeros = np.zeros_like(counts)
    return Proposals(counts, token_ids, np.full(len(token_ids), score, dtype=np.float32), zeros, zeros)


class DraftProposer(Protocol):
    """Guesses tokens from the tokens before them.

    Attributes:
        name: as in `--speculative-config`.
    """

    name: str

    def begin(self, request: EngineCoreRequest) -> None:
        """A request arrived."""

    def propose(self, rows: DraftRows) -> Proposals:
        """What may follow in each of these rows."""

    def end(self, handle: int, token_ids: np.ndarray, num_prompt_tokens: int) -> None:
        """A request ended, in whatever way; `token_ids` are its prompt and output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLoad:
    """What a step computes without drafts.

    Attributes:
        num_decoding: rows that compute one token and get one.
        num_other_tokens: of prompts.
        sum_seq_lens, max_seq_len: tokens of the decoding rows.
        num_left: drafts that the step has room for.
    """

    num_decoding: int
    num_other_tokens: int
    sum_seq_lens: int
    max_seq_len: int
    num_left: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculatedStep:
    """What became of a step.

    Attributes:
        load: as it was planned.
        proposals: as they were chosen from; None = none were asked for.
        kept: [num_rows] int32; drafts of each row of `proposals` that were verified.
        accepted: [num_rows] int32; those of them that stood.
        seconds: that the step took, from the one before it: to be scheduled, computed, sampled and taken in.
        proposing_s: that drafting took besides: proposing, choosing and reserving for this step, and what a proposer on
            the worker took for the next one.
        is_capture: it took longer than later ones like it, as it was captured.
    """

    load: StepLoad
    proposals: Proposals | None
    kept: np.ndarray
    accepted: np.ndarray
    seconds: float
    proposing_s: float
    is_capture: bool = False


class DraftController(Protocol):
    """Says how many drafts each step verifies."""

    @property
    def clock(self) -> Callable[[], float]:
        """Seconds, in which it is given what steps and drafting took."""

    def most_tokens(self, num_rows: int, num_other_tokens: int, max_seq_len: int) -> int:
        """Most drafts of a row that are worth proposing for the step that is planned; 0 = it is to be plain.

        Args:
            num_rows: that decode.
            num_other_tokens: tokens of prompts in the step.
            max_seq_len: tokens of the longest of those rows.
        """

    def num_watched(self) -> int:
        """Of the plain step just asked about: most drafts of some rows that are to be looked at, 0 = none.

        They are proposed and not verified; `observe` is called when it is known what would have become of them.
        """

    def observe(self, load: StepLoad, proposals: Proposals, accepted: np.ndarray) -> None:
        """[num_rows] of each row of a look at a step of this load, how many drafts would have stood."""

    def num_skipped(self) -> int:
        """Steps behind the one just asked about that are plain, too; not asked about if they have as many tokens."""

    def record_skipped(self, num_steps: int, seconds: float) -> None:
        """Steps that were not asked about took so long."""

    def choose(self, load: StepLoad, proposals: Proposals) -> np.ndarray:
        """[num_rows] int32; how many of each row's drafts are verified, the first ones; `load.num_left` at most."""

    def record(self, step: SpeculatedStep) -> None:
        """A step with decoding rows was taken in."""
