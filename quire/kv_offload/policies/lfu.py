"""LFU: the least frequently used key goes first; of equally many uses, the least recently used."""

from __future__ import annotations

from collections import OrderedDict

from quire.kv_offload.policies.base import EvictionPolicy


class LFUPolicy(EvictionPolicy):
    """Keys by the number of their uses; a key that goes is forgotten with its number.

    Every operation takes constant time.
    Source: Shah, Mitra, Matani 2010, "An O(1) algorithm for implementing the LFU cache eviction scheme".
    """

    def __init__(self, budget: int) -> None:
        super().__init__(budget)
        self._sizes: dict[bytes, int] = {}
        self._num_uses: dict[bytes, int] = {}
        self._by_uses: dict[int, OrderedDict[bytes, None]] = {}
        self._least = 1

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
            evicted.append(next(iter(self._by_uses[self._find_least()])))
            self.remove(evicted[-1])
        self._sizes[key] = size
        self.num_bytes += size
        self._num_uses[key] = self._least = 1
        self._by_uses.setdefault(1, OrderedDict())[key] = None
        return evicted

    def touch(self, key: bytes) -> None:
        """As `EvictionPolicy`."""
        num_uses = self._num_uses[key]
        self._take(key, num_uses)
        self._num_uses[key] = num_uses + 1
        self._by_uses.setdefault(num_uses + 1, OrderedDict())[key] = None
        if self._least == num_uses and num_uses not in self._by_uses:
            self._least = num_uses + 1

    def remove(self, key: bytes) -> None:
        """As `EvictionPolicy`."""
        if key in self._sizes:
            self.num_bytes -= self._sizes.pop(key)
            self._take(key, self._num_uses.pop(key))

    def _take(self, key: bytes, num_uses: int) -> None:
        keys = self._by_uses[num_uses]
        del keys[key]
        if not keys:
            del self._by_uses[num_uses]

    def _find_least(self) -> int:
        """The smallest number of uses; after a removal it may have grown."""
        if self._least not in self._by_uses:
            self._least = min(self._by_uses)
        return self._least
