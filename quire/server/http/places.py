"""Places: how many prompts of requests with many are in the engine at once.

Used by `running.Run`. A request's first prompt needs no place; the others wait for one in turn with those of other
requests, so that a thousand prompts leave rows of the engine to requests that come later. Owns the counts.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Waiter:
    """A prompt that waits for places.

    Attributes:
        since_ns: on the monotonic clock.
        turn: done when it has them.
    """

    count: int
    since_ns: int
    turn: asyncio.Future[None]


class Places:
    """As many as rows of the engine, less an eighth.

    Args:
        max_num_seqs: rows.
    """

    def __init__(self, max_num_seqs: int) -> None:
        self._most = max(1, max_num_seqs - max(1, max_num_seqs // 8))
        self._num_taken = 0
        self._waiting: deque[Waiter] = deque()

    @property
    def num_free(self) -> int:
        """Places that no prompt has."""
        return self._most - self._num_taken

    def needed(self, num_answers: int) -> int:
        """Places that a prompt takes."""
        return min(num_answers, self._most)

    def try_take(self, count: int) -> bool:
        """Take places, if there are so many and none is waiting."""
        if self._waiting or not self._has_room(count):
            return False
        self._note_taken(count)
        return True

    async def take(self, count: int) -> None:
        """Take places once there are so many."""
        if self.try_take(count):
            return
        waiter = Waiter(count, time.monotonic_ns(), asyncio.get_running_loop().create_future())
        self._waiting.append(waiter)
        self.serve()
        try:
            await waiter.turn
        except asyncio.CancelledError:
            if waiter.turn.done() and not waiter.turn.cancelled():
                self.give_back(count)
            else:
                waiter.turn.cancel()
                self.serve()
            raise

    def give_back(self, count: int) -> None:
        """Places are free again."""
        self._note_taken(-count)
        self.serve()

    def serve(self) -> None:
        """Let those that wait have what is free, in turn."""
        while self._waiting and (self._waiting[0].turn.done() or self._has_room(self._waiting[0].count)):
            waiter = self._waiting.popleft()
            if not waiter.turn.done():
                self._note_taken(waiter.count)
                waiter.turn.set_result(None)

    def _has_room(self, count: int) -> bool:
        return self._num_taken + count <= self._most

    def _note_taken(self, count: int) -> None:
        self._num_taken += count
