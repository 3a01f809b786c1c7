"""Drafts in a simulation: each is right with a given probability, if those before it in its row are.

`AssumedDrafts` proposes them to the real scheduler; `num_right` says how many stand. Called by `replica`. What a
proposer itself costs is not simulated, nor a controller: always the same number is proposed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from quire.core.drafts import DraftRows, Proposals
from quire.core.engine_messages import EngineCoreRequest

NextTokens = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""([n] handles, [n] positions) -> [n] int32 tokens of those sequences."""


@dataclass(frozen=True, slots=True)
class Speculation:
    """What is assumed of drafts.

    Attributes:
        num_tokens: proposed for each decoding row, in every step.
        acceptance_rate: probability that a draft stands given that those before it do.
    """

    num_tokens: int
    acceptance_rate: float


class AssumedDrafts:
    """A `DraftProposer` that knows the tokens that come.

    Args:
        next_tokens: the tokens that come.
    """

    name = "assumed"

    def __init__(self, speculation: Speculation, next_tokens: NextTokens, seed: int = 0) -> None:
        self._speculation = speculation
        self._next_tokens = next_tokens
        self._rng = np.random.default_rng(seed)

    def begin(self, request: EngineCoreRequest) -> None:
        """As `DraftProposer.begin`."""

    def propose(self, rows: DraftRows) -> Proposals:
        """As `DraftProposer.propose`."""
        rate = self._speculation.acceptance_rate
        counts = np.minimum(rows.max_tokens, self._speculation.num_tokens).astype(np.int32)
        places = places_in_rows(counts)
        handles, starts = np.repeat(rows.handles, counts), np.repeat(rows.num_tokens, counts)
        is_right = self._rng.random(len(places)) < rate
        token_ids = self._next_tokens(handles, starts + places) + ~is_right  # wrong: the token after the right one
        return Proposals(
            counts=counts, token_ids=token_ids.astype(np.int32), scores=np.full(len(places), rate, dtype=np.float32),
            sources=np.zeros(len(counts), dtype=np.int32), match_lengths=np.zeros(len(counts), dtype=np.int32),
        )  # fmt: skip

    def end(self, handle: int, token_ids: np.ndarray, num_prompt_tokens: int) -> None:
        """As `DraftProposer.end`."""


def num_right(is_right: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """[n] how many drafts of each row are right up to its first wrong one.

    Args:
        is_right: [sum of counts] bool.
        counts: [n] drafts of each row.
    """
    num_wrong = np.concatenate([[0], np.cumsum(~is_right)])
    stands = num_wrong[1:] == np.repeat(num_wrong[np.cumsum(counts) - counts], counts)
    return np.bincount(np.repeat(np.arange(len(counts)), counts)[stands], minlength=len(counts))


def places_in_rows(counts: np.ndarray) -> np.ndarray:
    """[sum of counts] place of each draft in its row, from 0."""
    places: np.ndarray = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    return places
