"""FairQueue, FairThread: work that waits, taken in turns from those whose it is. Safe to use from several threads."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar

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
            return self._pop(next(iter(self._items)))

    def pop_from(self, may_go_on: Callable[[str], bool]) -> T | None:
        """As `pop`, passing over the owners that may not go on; None when no other has anything."""
        with self._lock:
            owner = next(filter(may_go_on, self._items), None)
            return None if owner is None else self._pop(owner)

    def _pop(self, owner: str) -> T:
        items = self._items[owner]
        item = items.popleft()
        if items:
            self._items.move_to_end(owner)
        else:
            del self._items[owner]
        return item


class FairThread:
    """A thread that does what owners ask for, in turns.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, name)
        self._waiting: FairQueue[tuple[Callable[[], Any], Future[Any]]] = FairQueue()

    def submit(self, owner: str, work: Callable[[], T]) -> Future[T]:
        """Have `work` done when the owner's turn has come, unless the future is cancelled before.

        Raises:
            RuntimeError: it is closed.
        """
        done: Future[T] = Future()
        self._waiting.put(owner, (work, done))
        self._thread.submit(self._do_next)
        return done

    def close(self) -> None:
        """Begin nothing more; what waits is never done."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _do_next(self) -> None:
        work, done = self._waiting.pop()
        if not done.set_running_or_notify_cancel():
            return
        try:
            done.set_result(work())
        except Exception as error:  # its waiter gets it
            done.set_exception(error)
