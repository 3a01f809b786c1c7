"""DiskIndex: which blocks the directory holds, in memory, and which go when its bytes are used up.

Read by the thread that runs the steps, written by the threads of the store; the lock is never held while a disk works.
A name is the namespace's part of a path and the key: all namespaces of a directory share its bytes.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Sequence

from quire.kv_offload.directory import NAMESPACE_BYTES
from quire.kv_offload.policies.base import EvictionPolicy

MAX_PREFIXES = 64
"""Of other namespaces, those that are looked at to explain a miss."""


class DiskIndex:
    """Names of files, with their sizes."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self._policy = policy
        self._lock = threading.Lock()
        self._prefixes: dict[bytes, None] = {}  # in the order in which they were seen

    def __len__(self) -> int:
        return len(self._policy)

    def __contains__(self, name: bytes) -> bool:
        with self._lock:
            return name in self._policy

    @property
    def num_bytes(self) -> int:
        """Of all files."""
        return self._policy.num_bytes

    def num_leading(self, prefix: bytes, keys: Sequence[bytes], first: int) -> int:
        """How many names `prefix + key`, of `keys[first:]` from their beginning on, are here."""
        policy, end = self._policy, first
        with self._lock:
            while end < len(keys) and prefix + keys[end] in policy:
                end += 1
        return end - first

    def holds(self, names: Sequence[bytes]) -> list[bool]:
        """Which of these are here."""
        policy = self._policy
        with self._lock:
            return [name in policy for name in names]

    def is_of_others(self, prefix: bytes, key: bytes) -> bool:
        """Whether a block with this key is here under another prefix."""
        policy = self._policy
        with self._lock:
            others = itertools.islice(self._prefixes, MAX_PREFIXES)
            return any(one != prefix and one + key in policy for one in others)

    def touch(self, names: Iterable[bytes]) -> None:
        """Files were used, the last name last."""
        with self._lock:
            for name in names:
                if name in self._policy:
                    self._policy.touch(name)

    def fits(self, size: int) -> bool:
        """Whether a file of so many bytes may be kept at all."""
        return size <= self._policy.budget

    def add(self, name: bytes, size: int) -> list[bytes]:
        """A file is there; the names of those that go for it."""
        with self._lock:
            self._prefixes.setdefault(name[:NAMESPACE_BYTES])
            return [] if name in self._policy else self._policy.insert(name, max(1, size))

    def remove(self, name: bytes) -> None:
        """A file is gone, or worth nothing."""
        with self._lock:
            self._policy.remove(name)
