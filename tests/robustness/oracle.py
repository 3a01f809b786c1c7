"""A proposer that has seen the answers: it drafts what will be sampled, and now and then something else.

No other takes so many of the ways through verification: drafts of every length, all right, wrong at any place, or from
the first one on.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np

from quire.engine import core_factory
from quire.scheduler.setup import SchedulerSetup, make_scheduler
from tests.row_proposer import RowProposer

KEY_TOKENS = 8


class Oracle(RowProposer):
    """Drafts from recorded sequences. The first draft of each is wrong: by chance an answer might have no wrong one.

    Args:
        sequences: (prompt, output) of each.
        vocab_size: wrong drafts are below it.
        share_wrong: of the drafts.
        most: drafts of a row.

    Attributes:
        num_drafted: so far.
    """

    def __init__(
        self,
        sequences: Iterable[tuple[Sequence[int], Sequence[int]]],
        vocab_size: int,
        share_wrong: float = 0.2,
        most: int = 8,
        seed: int = 0,
    ) -> None:
        super().__init__(self._draft)
        self._by_beginning: dict[tuple[int, ...], list[np.ndarray]] = {}
        for prompt, output in sequences:
            whole = np.array([*prompt, *output], dtype=np.int32)
            self._by_beginning.setdefault(tuple(prompt[:KEY_TOKENS]), []).append(whole)
        self._vocab_size = vocab_size
        self._share_wrong = share_wrong
        self._most = most
        self._rng = random.Random(seed)
        self._begun = set[int]()
        self.num_drafted = 0

    def _draft(self, token_ids: np.ndarray, max_tokens: int) -> np.ndarray:
        """What comes next, up to a number of tokens that follows no law."""
        rng, size = self._rng, len(token_ids)
        known = next((one for one in self._candidates(token_ids) if (one[:size] == token_ids).all()), token_ids[-3:])
        first = size if len(known) > size else 0  # behind the end of a recorded answer the last tokens again
        drafts = np.array(known[first : first + min(max_tokens, rng.randint(1, self._most))])
        is_wrong = np.array([rng.random() < self._share_wrong for _ in drafts], dtype=np.bool_)
        if first and len(drafts) and id(known) not in self._begun:
            self._begun.add(id(known))
            is_wrong[0] = True
        drafts[is_wrong] = [rng.randrange(self._vocab_size) for _ in range(np.count_nonzero(is_wrong))]
        self.num_drafted += len(drafts)
        return drafts

    def _candidates(self, token_ids: np.ndarray) -> list[np.ndarray]:
        for length in range(KEY_TOKENS, 0, -1):  # prompts may be shorter than a key
            found = self._by_beginning.get(tuple(token_ids[:length].tolist()), [])
            if any(len(one) > len(token_ids) for one in found):
                return [one for one in found if len(one) > len(token_ids)]
        return []


@contextmanager
def drafting(proposer: Any) -> Iterator[None]:
    """Engines that are made meanwhile, in this process, get their drafts from `proposer`."""

    def make_drafting(setup: SchedulerSetup, **options: Any) -> Any:
        return make_scheduler(
            dataclasses.replace(setup, has_proposer=True, max_step_drafts=None),
            **{**options, "proposer": proposer, "controller": None},
        )

    with mock.patch.object(core_factory, "make_scheduler", make_drafting):
        yield
