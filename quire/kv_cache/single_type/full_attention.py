"""Blocks of layers that keep every token: full and latent attention, and windows that are masked, not freed.

Called by the coordinator. Owns the block table by row.
"""

from __future__ import annotations

from collections.abc import Sequence

from quire.kv_cache.single_type.row_blocks import RowBlocks


class FullAttentionManager(RowBlocks):
    """A row keeps all its blocks, so a cached prefix is one of which all blocks are cached."""

    def longest_hit(self, nodes: Sequence[int], max_blocks: int) -> int:
        """As `RowBlocks`."""
        blocks = self._blocks
        for block in range(max_blocks):
            if nodes[block] not in blocks:
                return block
        return max_blocks
