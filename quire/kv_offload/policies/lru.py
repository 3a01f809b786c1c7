"""LRU: the least recently used key goes first."""

from __future__ import annotations

from collections import OrderedDict

from quire.kv_offload.policies.base import EvictionPolicy


class LRUPolicy(EvictionPolicy):
    """Keys in the order of their last use."""

    def __init__(self, budget: int) -> None:
        super().__init__(budget)
        self._sizes: OrderedDict[bytes, int] = OrderedDict()

    def __contains__(self, key: bytes) -> bool:
        return key in self._sizes

    def __len__(self) -> int:
        return len(self._sizes)

    def insert(self, key: bytes, size: int) -> list[bytes]:
        """As `EvictionPolicy`."""
        if size > self.budget:
            return [key]
        evicted = []
        while self.num_bytes + size > self.budget:
            oldest, freed = self._sizes.popitem(last=False)
            self.num_bytes -= freed
            evicted.append(oldest)
        self._sizes[key] = size
        self.num_bytes += size
        return evicted

    def touch(self, key: bytes) -> None:
        """As `EvictionPolicy`."""
        self._sizes.move_to_end(key)

    def remove(self, key: bytes) -> None:
        """As `EvictionPolicy`."""
        self.num_bytes -= self._sizes.pop(key, 0)
