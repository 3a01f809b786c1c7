"""Blocks of layers with a recurrent state: one per row, whatever its length. Called by the coordinator.

Example: a row whose state was computed for 70 tokens holds one block, and needs no other for its 71st. What is in it is
the state after the newest computed token, which is overwritten by the next: no other request finds or copies it, and a
preempted one begins anew, unless its block was swapped.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from quire.core.kv_spec import MambaSpec
from quire.kv_cache.row_prefixes import FilledBlocks
from quire.kv_cache.single_type.row_blocks import ManagerParts, RowBlocks


class StateManager(RowBlocks):
    """A row holds one block, number 0 of its table, from its first token on."""

    def __init__(self, spec: MambaSpec, parts: ManagerParts, group: int) -> None:
        super().__init__(spec, parts, group)
        self._block_table = np.zeros((parts.max_num_seqs, 1), dtype=np.int32)

    def computed_blocks(self, row: int, num_tokens: int) -> np.ndarray | None:
        """None: the state of earlier tokens is overwritten."""
        return None

    def num_new_blocks(self, num_shared: int, num_blocks: int, num_tokens: int) -> int:
        """As `RowBlocks`: the state's block, which no prefix brings along."""
        return min(num_tokens, 1)

    def num_missing_blocks(self, rows: np.ndarray, num_tokens: np.ndarray) -> np.ndarray:
        """As `RowBlocks`."""
        missing: np.ndarray = np.maximum(np.minimum(num_tokens, 1) - self._num_blocks[rows], 0)
        return missing

    def share(self, row: int, cached_block_ids: np.ndarray, num_blocks: int) -> None:
        """As `RowBlocks`; there is no cached prefix."""
        assert not len(cached_block_ids), "states are not cached"

    def extend(self, row: int, num_tokens: int) -> np.ndarray:
        """As `RowBlocks`."""
        return super().extend(row, min(num_tokens, 1))

    def free_beyond(self, row: int, num_tokens: int) -> None:
        """As `RowBlocks`: the block stays; what it holds cannot be taken back to fewer tokens."""

    def longest_hit(self, nodes: Sequence[int], max_blocks: int) -> int:
        """None: a state is gone when the next token is computed."""
        return 0

    def publish(self, filled: FilledBlocks) -> None:
        """Nothing is made findable."""
