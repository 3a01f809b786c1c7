"""Pages of layers that keep every token: full and latent attention, and windows that are masked, not freed.

Called by the coordinator. Owns the block table by row.
"""

from __future__ import annotations

from collections.abc import Sequence

from quire.kv_cache.single_type.row_blocks import RowBlocks


class FullAttentionManager(RowBlocks):
    """A row keeps all its pages, so a cached prefix is one of which all pages are cached."""

    def longest_hit(self, nodes: Sequence[int], max_pages: int) -> int:
        """As `RowBlocks`."""
        blocks = self._blocks
        for page in range(max_pages):
            if nodes[page] not in blocks:
                return page
        return max_pages
