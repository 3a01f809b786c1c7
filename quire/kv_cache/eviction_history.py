"""Prefixes whose last block cannot be found (any longer), and why: evicted, never stored.

Written by the prefix index and the KV cache manager, read when a miss is explained. Bounded; the oldest go first. A
prefix that is remembered stays a node of the tree.
"""

from __future__ import annotations

from collections import OrderedDict

from quire.core.cache_info import MissReason
from quire.kv_cache.prefix_tree import PrefixTree

MAX_REMEMBERED = 1 << 15


class EvictionHistory:
    """The `capacity` prefixes that were noted last."""

    def __init__(self, capacity: int, tree: PrefixTree) -> None:
        self._capacity = min(capacity, MAX_REMEMBERED)
        self._tree = tree
        self._reasons: OrderedDict[int, MissReason] = OrderedDict()

    def __len__(self) -> int:
        return len(self._reasons)

    def note(self, node: int, reason: MissReason) -> None:
        """The last block of a prefix, which has a user, is not to be found, for `reason`."""
        if node in self._reasons:
            self._reasons.move_to_end(node)
        else:
            self._tree.hold(node)
        self._reasons[node] = reason
        if len(self._reasons) > self._capacity:
            self._tree.release(self._reasons.popitem(last=False)[0])

    def reason(self, node: int) -> MissReason | None:
        """Why the last block of a prefix is not to be found; None = not known."""
        return self._reasons.get(node)

    def clear(self) -> None:
        """Forget all."""
        for node in self._reasons:
            self._tree.release(node)
        self._reasons.clear()
