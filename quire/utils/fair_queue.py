"""FairQueue: work that waits, taken in turns from those whose it is. Safe to use from several threads."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from typing import Generic, TypeVar

T = TypeVar("T")


class FairQueue(Generic[T]):
    """First in, first out for each owner, and round robin between owners: a flood of one delays others by one item."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._items: OrderedDict[str, deque[T]] = OrderedDict()

    def __len__(self) -> int:
        with self._lock:
            return sum(map(len, self._items.values()))

    def put(self, owner: str, item: T) -> None:
        """Add to the end of what `owner` has; who had nothing comes last."""
        with self._lock:
            self._items.setdefault(owner, deque()).append(item)

    def pop(self) -> T:
        """The next item; its owner's next turn comes after all others'. There must be one."""
        with self._lock:
            owner, items = next(iter(self._items.items()))
            item = items.popleft()
            if items:
                self._items.move_to_end(owner)
            else:
                del self._items[owner]
            return item
