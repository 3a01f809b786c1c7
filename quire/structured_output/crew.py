"""Crew: threads that take grammars through tokens beside the engine's loop. Owned by the grammar manager.

A library's call cannot be interrupted. Where one takes long, the engine's loop does not wait for it, and another thread
takes what stands behind it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable

PATIENCE_S, MAX_WAIT_S = 0.02, 0.03
"""A step waits so long for one piece of work, and for all of them."""
MAX_THREADS = 4

Work = Callable[[], None]


class Crew:
    """Does work in order, and beside what takes long; the work raises nothing.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        lock = threading.Lock()
        self._has_work, self._is_settled = threading.Condition(lock), threading.Condition(lock)
        self._queue: deque[Work] = deque()
        self._started: dict[int, float] = {}  # by thread: when it began what it does
        self._num_threads = 0
        self._is_closed = False

    def put(self, work: Iterable[Work]) -> None:
        """Add work."""
        with self._has_work:
            self._queue.extend(work)
            if self._queue and not self._num_threads:
                self._add_thread()
            self._has_work.notify()

    def settle(self) -> None:
        """Wait until all is done, but only a little for what takes long."""
        with self._is_settled:
            last = self._clock() + MAX_WAIT_S
            while self._queue or self._started:
                now = self._clock()
                newest = max(self._started.values(), default=now)
                if now >= last:
                    return
                if now < newest + PATIENCE_S:
                    self._is_settled.wait(min(last, newest + PATIENCE_S) - now)
                elif not self._queue or self._num_threads == MAX_THREADS:
                    return
                else:
                    self._add_thread()
                    self._is_settled.wait(last - now)

    def close(self) -> None:
        """Begin nothing more; returns at once."""
        with self._has_work:
            self._is_closed = True
            self._queue.clear()
            self._has_work.notify_all()

    def _add_thread(self) -> None:
        self._num_threads += 1
        threading.Thread(target=self._run, name="grammars", daemon=True).start()

    def _run(self) -> None:
        me, work = threading.get_ident(), None
        while True:
            if work is not None:
                work()
            with self._has_work:  # the lock of both conditions
                self._started.pop(me, None)
                if not self._queue and not self._started:
                    self._is_settled.notify_all()
                while not self._queue and not self._is_closed:
                    self._has_work.wait()
                if self._is_closed:
                    return
                work = self._queue.popleft()
                self._started[me] = self._clock()
