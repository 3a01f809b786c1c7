"""PromptWorkers: threads for long bodies, chat templates and texts, shared fairly by the tenants.

Used by the body reader and the prompt reader, on the event loop. Tenants take turns, however much each of them sent,
and what is long never stands in the way of what is short: the two have threads of their own. Owns these threads, and
what waits for them.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")

LONG_BYTES = 1 << 14
SHORT_THREADS = 2
CPUS_PER_LONG_THREAD = 4


@dataclass(slots=True, eq=False)
class _Job:
    work: Callable[[], Any]
    result: asyncio.Future[Any]


class FairLane:
    """Some threads, and a queue for each tenant.

    Args:
        num_threads: how many; while there are several, one tenant has at most all but one.
        name: of the threads.
    """

    def __init__(self, num_threads: int, name: str) -> None:
        self._num_threads = num_threads
        self._most_of_one = max(1, num_threads - 1)
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._waiting: dict[str, deque[_Job]] = {}  # whose turn is next comes first
        self._running: Counter[str] = Counter()

    async def run(self, tenant: str, work: Callable[[], T]) -> T:
        """The result of `work`, which runs in a thread when it is its tenant's turn; unless cancelled before."""
        job = _Job(work, asyncio.get_running_loop().create_future())
        self._waiting.setdefault(tenant, deque()).append(job)
        self._fill()
        try:
            result: T = await job.result
        except asyncio.CancelledError:
            if job in (jobs := self._waiting.get(tenant, deque())):
                jobs.remove(job)
            raise
        return result

    def close(self) -> None:
        """End the threads once they are done; what waits is dropped."""
        self._waiting.clear()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _fill(self) -> None:
        while self._running.total() < self._num_threads and (found := self._next()) is not None:
            tenant, job = found
            self._running[tenant] += 1
            done = asyncio.get_running_loop().run_in_executor(self._threads, job.work)
            done.add_done_callback(lambda done, tenant=tenant, job=job: self._finish(tenant, job, done))  # type: ignore[misc]

    def _next(self) -> tuple[str, _Job] | None:
        for tenant in list(self._waiting):
            if self._running[tenant] >= self._most_of_one:
                continue
            jobs = self._waiting.pop(tenant)
            if not jobs:  # all were cancelled
                continue
            job = jobs.popleft()
            if jobs:
                self._waiting[tenant] = jobs  # behind the others
            return tenant, job
        return None

    def _finish(self, tenant: str, job: _Job, done: asyncio.Future[Any]) -> None:
        self._running -= Counter((tenant,))
        if not job.result.done():
            if done.cancelled():
                job.result.cancel()
            elif (error := done.exception()) is not None:
                job.result.set_exception(error)
            else:
                job.result.set_result(done.result())
        if not done.cancelled():
            self._fill()


class PromptWorkers:
    """A lane for what is short, and one for what is long."""

    def __init__(self) -> None:
        self._short = FairLane(SHORT_THREADS, "prompt")
        self._long = FairLane(max(1, (os.cpu_count() or 1) // CPUS_PER_LONG_THREAD), "long-prompt")

    async def run(self, tenant: str, num_bytes: int, work: Callable[[], T]) -> T:
        """The result of `work` on so many bytes or characters of `tenant`'s."""
        lane = self._short if num_bytes < LONG_BYTES else self._long
        return await lane.run(tenant, work)

    def close(self) -> None:
        """End the threads once they are done."""
        self._short.close()
        self._long.close()
