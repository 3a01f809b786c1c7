"""Which drafts stand: sampled at once, in turns, or some rows in one way and some in the other, rows get the same."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from quire.core.logprobs import LogprobsArrays
from quire.sample.sampler import SamplerOutput
from quire.worker.draft_verification import Verified, verify_drafts

VOCAB = 3


class Rows:
    """Rows with drafts, and a sampler whose tokens follow from the row of logits, the row and the position."""

    def __init__(self, seed: int, num_rows: int = 9) -> None:
        rng = np.random.default_rng(seed)
        counts = rng.integers(1, 7, num_rows)
        self.start_loc = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        self.drafts = rng.integers(0, VOCAB, self.start_loc[-1]).astype(np.int32)
        self.tokens = rng.integers(0, VOCAB, self.start_loc[-1]).astype(np.int32)
        self.is_invalid = rng.random(len(self.tokens)) < 0.1
        firsts = self.start_loc[:-1]
        self.closed = np.setdiff1d(np.flatnonzero(rng.random(len(self.tokens)) < 0.1), firsts)
        self.rows = rng.permutation(20)[:num_rows].astype(np.int32)
        self.positions = rng.integers(5, 50, num_rows)
        self.wants_logprobs = rng.random(20) < 0.5
        self.calls: list[int] = []
        self.taken: dict[int, list[tuple[int, int]]] = {}

    def choose(self, lines: np.ndarray, rows: np.ndarray, positions: np.ndarray) -> SamplerOutput:
        self.calls.append(len(lines))
        firsts = np.searchsorted(self.start_loc, lines, "right") - 1
        assert (rows == self.rows[firsts]).all()
        assert (positions - lines == self.positions[firsts] - self.start_loc[firsts]).all()
        index = np.flatnonzero(self.wants_logprobs[rows]).astype(np.int32)
        ids = np.stack([self.tokens[lines[index]], lines[index].astype(np.int32)], axis=1)
        logprobs = LogprobsArrays(index, ids, ids.astype(np.float32), ids)
        return SamplerOutput(self.tokens[lines], logprobs if len(index) else None, self.is_invalid[lines])

    def take_in(self, rows: np.ndarray, positions: np.ndarray, token_ids: np.ndarray) -> None:
        for row, position, token in zip(rows.tolist(), positions.tolist(), token_ids.tolist(), strict=True):
            self.taken.setdefault(row, []).append((position, token))

    def verify(self, follows: np.ndarray | None) -> Verified:
        self.calls.clear()
        self.taken.clear()
        batch: Any = SimpleNamespace(
            logits_start_loc=self.start_loc, sampling_rows=self.rows, sampling_positions=self.positions
        )
        return verify_drafts(batch, self.drafts, self.choose, self.take_in, self.closed, follows)


def plain(verified: Verified) -> list[Any]:
    lines = verified.logprobs
    columns = [] if lines is None else [lines.index, lines.token_ids, lines.logprobs, lines.ranks]
    return [one.tolist() for one in (*verified[:2], *columns)]


@pytest.mark.parametrize("num_rows", [1, 9])
@pytest.mark.parametrize("seed", range(20))
def test_rows_that_nothing_follows_get_what_they_get_position_by_position(seed: int, num_rows: int):
    rows = Rows(seed, num_rows)
    expected = rows.verify(None)
    taken = {row: sorted(tokens) for row, tokens in rows.taken.items()}
    bad = sorted(zip(expected.rows.tolist(), expected.positions.tolist(), strict=True))
    for follows in (np.zeros(num_rows, dtype=bool), np.arange(num_rows) % 3 == 0, np.ones(num_rows, dtype=bool)):
        found = rows.verify(follows)
        assert plain(found) == plain(expected)
        assert {row: sorted(tokens) for row, tokens in rows.taken.items()} == taken
        assert sorted(zip(found.rows.tolist(), found.positions.tolist(), strict=True)) == bad
        if not follows.any():
            assert rows.calls == [len(rows.tokens)], "one call for all"
