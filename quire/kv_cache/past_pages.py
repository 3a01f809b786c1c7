"""Names of pages that cannot be found (any longer), and why: evicted, reset, never stored.

Written by the prefix index and the KV cache manager, asked when a miss is explained. Bounded; the oldest go first.
"""

from __future__ import annotations

from collections.abc import Mapping

from quire.core.cache_info import MissReason

MAX_REMEMBERED = 1 << 14


class PastPages:
    """The newest `capacity` names or more, at most twice as many, and those that the last reset forgot."""

    def __init__(self, capacity: int) -> None:
        self._capacity = min(capacity, MAX_REMEMBERED)
        self._young: dict[bytes, MissReason] = {}
        self._old: dict[bytes, MissReason] = {}
        self._before_reset: Mapping[bytes, int] = {}

    def note(self, block_hash: bytes, reason: MissReason) -> None:
        """A page is not to be found, for `reason`."""
        self._young[block_hash] = reason
        if len(self._young) > self._capacity:
            self._old, self._young = self._young, {}

    def note_reset(self, block_hashes: Mapping[bytes, int]) -> None:
        """All these pages are gone at once; the mapping is kept as it is, and must not change."""
        self._young, self._old, self._before_reset = {}, {}, block_hashes

    def reason(self, block_hash: bytes) -> MissReason | None:
        """Why a page is not to be found; None = not known."""
        found = self._young.get(block_hash) or self._old.get(block_hash)
        if found is None and block_hash in self._before_reset:
            return MissReason.CACHE_RESET
        return found
