"""Block copies that were not sent to the worker yet.

Owned by the KV cache manager. A partly filled block that two requests share is copied for the one that joins; until the
message with the copy is made, a reference keeps the source from being given out.
"""

from __future__ import annotations

import numpy as np

from quire.core.scheduler_output import NO_BLOCK_COPIES, BlockCopies
from quire.kv_cache.block_pool import BlockPool


class PendingCopies:
    """Copies by the row that owns their targets."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._by_row: dict[int, BlockCopies] = {}

    def add(self, row: int, source_ids: np.ndarray, target_ids: np.ndarray) -> None:
        """Copy blocks in use, [num_copies] int32, onto blocks of `row`, which has no other copy due."""
        self._pool.share(source_ids)
        self._by_row[row] = BlockCopies(source_ids, target_ids)

    def drop(self, row: int) -> None:
        """The row gives up its blocks: its copies are of no use."""
        copies = self._by_row.pop(row, None)
        if copies is not None:
            self._pool.free(copies.source_ids)

    def source_ids(self) -> list[int]:
        """Blocks that are kept for copies, one entry for each."""
        return [block_id for copies in self._by_row.values() for block_id in copies.source_ids.tolist()]

    def take(self) -> BlockCopies:
        """All copies due; the worker makes them before anything is written, so their sources are free to go."""
        if not self._by_row:
            return NO_BLOCK_COPIES
        due = list(self._by_row.values())
        for row in list(self._by_row):
            self.drop(row)
        return BlockCopies(
            np.concatenate([copies.source_ids for copies in due]),
            np.concatenate([copies.target_ids for copies in due]),
        )
