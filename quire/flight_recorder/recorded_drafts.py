"""RecordedDrafts: a proposer that proposes what a recording holds, so that a replay needs neither model nor proposer.

Used by `replay`. A recording holds the drafts that were verified: what was proposed beyond them, by whom, and why the
controller left it out changed nothing else, so all of it comes from here and no controller chooses again.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from quire.config.speculative import MAX_TOKENS
from quire.core.drafts import DraftRows, Proposals, SpeculatedStep, StepLoad
from quire.core.engine_messages import EngineCoreRequest


class RecordedDrafts:
    """The drafts of the step that is replayed next, by row: a `DraftProposer`, and a `DraftController` that keeps all.

    The scheduler needs both, as its recorded state says where it had them.
    """

    name = "recorded"

    def __init__(self) -> None:
        self._by_row: dict[int, Sequence[int]] = {}

    def expect(self, rows: np.ndarray, drafts: Sequence[Sequence[int]]) -> None:
        """The next step is recorded to have these `rows`, with these drafts of each; empty = none of any."""
        self._by_row = dict(zip(rows.tolist(), drafts, strict=False)) if drafts else {}

    def clock(self) -> float:
        """As `DraftController.clock`; it stands, as times are recorded."""
        return 0.0

    def begin(self, request: EngineCoreRequest) -> None:
        """As `DraftProposer.begin`."""

    def propose(self, rows: DraftRows) -> Proposals:
        """As `DraftProposer.propose`."""
        by_row = [
            self._by_row.get(row, ())[:most]
            for row, most in zip(rows.rows.tolist(), rows.max_tokens.tolist(), strict=True)
        ]
        counts = np.array([len(drafts) for drafts in by_row], dtype=np.int32)
        token_ids = np.array([token for drafts in by_row for token in drafts], dtype=np.int32)
        zeros = np.zeros(len(counts), dtype=np.int32)
        return Proposals(
            counts=counts, token_ids=token_ids, scores=np.ones(len(token_ids), dtype=np.float32), sources=zeros,
            match_lengths=zeros,
        )  # fmt: skip

    def end(self, handle: int, token_ids: np.ndarray, num_prompt_tokens: int) -> None:
        """As `DraftProposer.end`."""

    def most_tokens(self, num_rows: int, num_other_tokens: int, max_seq_len: int) -> int:
        """As `DraftController.most_tokens`."""
        return MAX_TOKENS

    def num_watched(self) -> int:
        """As `DraftController.num_watched`."""
        return 0

    def observe(self, load: StepLoad, proposals: Proposals, accepted: np.ndarray) -> None:
        """As `DraftController.observe`."""

    def num_skipped(self) -> int:
        """As `DraftController.num_skipped`."""
        return 0

    def record_skipped(self, num_steps: int, seconds: float) -> None:
        """As `DraftController.record_skipped`."""

    def choose(self, load: StepLoad, proposals: Proposals) -> np.ndarray:
        """As `DraftController.choose`: they were chosen before they were recorded."""
        return proposals.counts

    def record(self, step: SpeculatedStep) -> None:
        """As `DraftController.record`."""
