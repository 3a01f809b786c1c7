"""Places: how many prompts of requests with many are in the engine at once.

Used by `running.Run`. A request's first prompt needs no place; the others wait for one in turn with those of other
requests, so that a thousand prompts leave rows of the engine to requests that come later. Owns the counts.
"""

from __future__ import annotations

import asyncio
from collections import deque


class Places:
    """As many as rows of the engine, less an eighth.

    Args:
        max_num_seqs: rows.
    """

    def __init__(self, max_num_seqs: int) -> None:
        self._most = self._num_free = max(1, max_num_seqs - max(1, max_num_seqs // 8))
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    def needed(self, num_answers: int) -> int:
        """Places that a prompt takes."""
        return min(num_answers, self._most)

    def try_take(self, count: int) -> bool:
        """Take places, if there are so many and none is waiting."""
        if self._waiting or self._num_free < count:
            return False
        self._num_free -= count
        return True

    async def take(self, count: int) -> None:
        """Take places once there are so many."""
        if self.try_take(count):
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((count, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.give_back(count)
            raise

    def give_back(self, count: int) -> None:
        """Places are free again."""
        self._num_free += count
        while self._waiting and (self._waiting[0][1].done() or self._waiting[0][0] <= self._num_free):
            count, turn = self._waiting.popleft()
            if not turn.done():
                self._num_free -= count
                turn.set_result(None)
