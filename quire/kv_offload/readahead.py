"""Readahead: which blocks are likely to be loaded next, learned from the order in which blocks were used.

Used by `OffloadStore` from the thread that runs the steps. A block that was loaded is likely to be followed by the one
that followed it last time: of a conversation that is taken up again, of a document that many prompts share. What is
proposed is judged by what is used of it: a few blocks are tried, and more only where enough of these were loaded soon.
Where prompts never continue alike that makes less than one read in a hundred in vain.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Sequence

MAX_LEARNED = 1 << 16
"""Blocks whose successor is remembered."""
DEPTH = 8
"""Most blocks that are proposed at once."""
TRIAL, BATCH = 32, 512
"""Proposed blocks that are judged together: those of a trial, and those proposed after one that succeeded."""
HORIZON, PAUSE = 2048, 4096
"""Blocks that are loaded before a trial is judged, and then before the next one where it failed."""
MIN_USED_SHARE = 0.25


class Readahead:
    """Successors of blocks, and whether proposals are of use."""

    def __init__(self) -> None:
        self._next: OrderedDict[bytes, bytes] = OrderedDict()
        self._batch: list[bytes] = []
        self._before: list[bytes] = []  # the batch before, not judged yet
        self._unused: set[bytes] = set()
        self._is_proven = False
        self._num_loaded = self._wait_until = 0

    def learn(self, keys: Sequence[bytes]) -> None:
        """Blocks of one sequence, in its order, were used or stored."""
        successors = self._next
        for key, after in itertools.pairwise(keys):
            successors[key] = after
            successors.move_to_end(key)
        while len(successors) > MAX_LEARNED:
            successors.popitem(last=False)

    def propose(self, loaded: Sequence[bytes], is_here: Callable[[bytes], bool]) -> list[bytes]:
        """What to read after these blocks of one sequence were loaded; empty where it would be of no use.

        Args:
            is_here: whether a block need not be read.
        """
        self._num_loaded += len(loaded)
        self._unused.difference_update(loaded)
        if not loaded or self._num_loaded < self._wait_until or not self._has_room():
            return []
        proposed: list[bytes] = []
        key = self._next.get(loaded[-1])
        for _ in range(DEPTH):
            if key is None:
                break
            if not is_here(key):
                proposed.append(key)
            key = self._next.get(key)
        self._batch += proposed
        self._unused.update(proposed)
        return proposed

    def _has_room(self) -> bool:
        """Whether more may be proposed; judges what was."""
        if len(self._batch) < (BATCH if self._is_proven else TRIAL):
            return True
        if not self._is_proven and not self._before:  # the trial is complete, and what it read is not used yet
            self._before, self._wait_until = self._batch, self._num_loaded + HORIZON
            return False
        num_used = sum(key not in self._unused for key in self._before)
        if num_used < MIN_USED_SHARE * len(self._before):
            self._is_proven, self._batch, self._before = False, [], []
            self._unused.clear()
            self._wait_until = self._num_loaded + PAUSE
            return False
        self._unused.difference_update(self._before)
        self._before, self._batch, self._is_proven = (self._batch if self._is_proven else []), [], True
        return True
