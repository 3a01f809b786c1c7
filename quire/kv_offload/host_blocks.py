"""HostBlocks: blocks in host memory, of which a policy drops some when the bytes are used up. Part of `OffloadStore`.

Contents are arrays that are never written again, so one that is dropped while a thread still copies it stays until that
is done.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np

from quire.kv_offload.policies.base import EvictionPolicy


class HostBlocks:
    """Key -> payload."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self._policy = policy
        self._payloads: dict[bytes, np.ndarray] = {}
        self._lock = threading.Lock()

    def __contains__(self, key: bytes) -> bool:
        return key in self._payloads

    @property
    def num_bytes(self) -> int:
        """Of all payloads."""
        return self._policy.num_bytes

    @property
    def budget(self) -> int:
        """Most bytes."""
        return self._policy.budget

    def get(self, key: bytes) -> np.ndarray | None:
        """[num_bytes] uint8, not to be written; None = it is not here (any longer)."""
        return self._payloads.get(key)

    def put(self, key: bytes, payload: np.ndarray) -> int:
        """Keep [num_bytes] uint8, which is not written any longer; how many blocks went for it."""
        with self._lock:
            if key in self._payloads:
                return 0
            evicted = self._policy.insert(key, len(payload))
            if evicted == [key]:
                return 0
            for one in evicted:
                del self._payloads[one]
            self._payloads[key] = payload
            return len(evicted)

    def touch(self, keys: Sequence[bytes]) -> None:
        """Blocks of one sequence, in its order, were used: its first block is the last to go."""
        with self._lock:
            for key in reversed(keys):
                if key in self._policy:
                    self._policy.touch(key)
