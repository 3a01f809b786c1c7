"""TierStack: several tiers behind one cache, such as host memory and disk, and a connector. Called by `KVTiers`.

No state. `KVTiers` takes it apart: it asks the tiers in order, and accounts for the transfers of each.
"""

from __future__ import annotations

from collections.abc import Sequence

from quire.scheduler.kv_tier import KVTier


class TierStack(KVTier):
    """Tiers in the order in which they are asked."""

    def __init__(self, tiers: Sequence[KVTier]) -> None:
        self._tiers = tuple(tiers)

    @property
    def parts(self) -> Sequence[KVTier]:
        """As `KVTier`."""
        return self._tiers

    def release_blocks(self) -> None:
        """As `KVTier`, of all."""
        for tier in self._tiers:
            tier.release_blocks()
