"""ARC: keys that were used once and keys that were used again share the bytes in proportions that follow the uses.

Source: Megiddo and Modha 2003, "ARC: A Self-Tuning, Low Overhead Replacement Cache", figure 4, whose names are kept:
T1 and T2 are kept, B1 and B2 are the ghosts of what went from them, p is the target size of T1. Sizes are bytes in
place of pages; where all keys have one size, it is the paper's algorithm step for step.
"""

from __future__ import annotations

from collections import OrderedDict

from quire.kv_offload.policies.base import EvictionPolicy


class _Queue:
    """Keys with their sizes, the least recently used first."""

    def __init__(self) -> None:
        self._sizes: OrderedDict[bytes, int] = OrderedDict()
        self.num_bytes = 0

    def __contains__(self, key: bytes) -> bool:
        return key in self._sizes

    def __len__(self) -> int:
        return len(self._sizes)

    def push(self, key: bytes, size: int) -> None:
        self._sizes[key] = size
        self.num_bytes += size

    def take(self, key: bytes) -> int:
        size = self._sizes.pop(key)
        self.num_bytes -= size
        return size

    def pop_oldest(self) -> tuple[bytes, int]:
        key, size = self._sizes.popitem(last=False)
        self.num_bytes -= size
        return key, size


class ARCPolicy(EvictionPolicy):
    """One scan over many keys pushes out no key that was used twice."""

    def __init__(self, budget: int) -> None:
        super().__init__(budget)
        self._t1, self._t2, self._b1, self._b2 = _Queue(), _Queue(), _Queue(), _Queue()
        self._p = 0.0

    def __contains__(self, key: bytes) -> bool:
        return key in self._t1 or key in self._t2

    def __len__(self) -> int:
        return len(self._t1) + len(self._t2)

    def insert(self, key: bytes, size: int) -> list[bytes]:
        """As `EvictionPolicy`: cases II to IV of the paper."""
        if size > self.budget:
            return [key]
        evicted: list[bytes] = []
        if key in self._b1:
            ratio = max(1.0, self._b2.num_bytes / self._b1.num_bytes)
            self._p = min(float(self.budget), self._p + ratio * size)
            self._replace(evicted, size, is_in_b2=False)
            self._b1.take(key)
            self._t2.push(key, size)
        elif key in self._b2:
            ratio = max(1.0, self._b1.num_bytes / self._b2.num_bytes)
            self._p = max(0.0, self._p - ratio * size)
            self._replace(evicted, size, is_in_b2=True)
            self._b2.take(key)
            self._t2.push(key, size)
        else:
            self._make_room(evicted, size)
            self._t1.push(key, size)
        self._count()
        return evicted

    def touch(self, key: bytes) -> None:
        """As `EvictionPolicy`: case I of the paper."""
        size = (self._t1 if key in self._t1 else self._t2).take(key)
        self._t2.push(key, size)

    def remove(self, key: bytes) -> None:
        """As `EvictionPolicy`."""
        for queue in (self._t1, self._t2, self._b1, self._b2):
            if key in queue:
                queue.take(key)
        self._count()

    def _make_room(self, evicted: list[bytes], size: int) -> None:
        """Case IV: a key that neither the cache nor its ghosts have."""
        t1, b1, c = self._t1, self._b1, self.budget
        while t1.num_bytes + b1.num_bytes + size > c and len(b1):
            b1.pop_oldest()
        while t1.num_bytes + size > c and len(t1):  # T1 fills the cache: what goes leaves no ghost
            evicted.append(t1.pop_oldest()[0])
        while self._num_all_bytes() + size > 2 * c and len(self._b2):
            self._b2.pop_oldest()
        self._replace(evicted, size, is_in_b2=False)

    def _replace(self, evicted: list[bytes], size: int, *, is_in_b2: bool) -> None:
        """REPLACE: the oldest of T1 or of T2 goes and leaves a ghost, until `size` bytes are free."""
        t1, t2 = self._t1, self._t2
        while t1.num_bytes + t2.num_bytes + size > self.budget:
            is_t1_over = t1.num_bytes > self._p or (is_in_b2 and t1.num_bytes == self._p)
            if len(t1) and (is_t1_over or not len(t2)):
                key, freed = t1.pop_oldest()
                self._b1.push(key, freed)
            else:
                key, freed = t2.pop_oldest()
                self._b2.push(key, freed)
            evicted.append(key)

    def _num_all_bytes(self) -> int:
        return sum(queue.num_bytes for queue in (self._t1, self._t2, self._b1, self._b2))

    def _count(self) -> None:
        self.num_bytes = self._t1.num_bytes + self._t2.num_bytes
