"""WorkerQueue: compile workers and the grammars that wait for one, tenants in turn. Owned by the compile pool."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from quire.structured_output.compile.messages import WorkerSetup
from quire.structured_output.compile.worker_process import WorkerProcess
from quire.utils.fair_queue import FairQueue


class WorkerQueue:
    """Workers, a thread for each that waits for its answers, and what waits for them."""

    def __init__(self, setup: WorkerSetup, num_workers: int) -> None:
        self.workers = [WorkerProcess(setup) for _ in range(num_workers)]
        self.threads = ThreadPoolExecutor(num_workers, "grammars")
        self._waiting: FairQueue[Callable[[WorkerProcess], None]] = FairQueue()
        self._idle: queue.LifoQueue[WorkerProcess] = queue.LifoQueue()
        for worker in self.workers:
            self._idle.put(worker)

    def submit(self, tenant: str, work: Callable[[WorkerProcess], None]) -> None:
        """Have `work` done with a worker that is free, when the tenant's turn has come; not when it is closed."""
        self._waiting.put(tenant, work)
        with suppress(RuntimeError):  # closed
            self.threads.submit(self._run_next)

    def _run_next(self) -> None:
        worker = self._idle.get()
        try:
            self._waiting.pop()(worker)
        finally:
            self._idle.put(worker)


def close(queues: Sequence[WorkerQueue]) -> None:
    """Kill all workers, then wait for them."""
    for one in queues:
        for worker in one.workers:
            worker.kill()
    for one in queues:
        one.threads.shutdown(wait=threading.current_thread() is threading.main_thread(), cancel_futures=True)
        for worker in one.workers:
            worker.dispose()
