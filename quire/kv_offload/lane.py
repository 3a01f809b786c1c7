"""Lane: a thread that takes jobs from a queue, of which others can ask since when it is at one block."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import SimpleQueue

from quire.kv_offload.job import Job
from quire.logger import get_logger

logger = get_logger(__name__)


class Lane:
    """Does `work` with each job of `jobs`, until it finds None there.

    Args:
        work: is given the job, and what to call before each part of it that may hang.
        fail: is given a job with which `work` raised.
    """

    def __init__(
        self,
        name: str,
        jobs: SimpleQueue[Job | None],
        work: Callable[[Job, Callable[[], None]], None],
        fail: Callable[[Job], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._jobs, self._work, self._fail, self._clock = jobs, work, fail, clock
        self._busy_since: float | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def busy_s(self, now: float) -> float:
        """Seconds for which it has been at the same part of a job; 0 = it is at none."""
        since = self._busy_since
        return 0.0 if since is None else now - since

    def join(self, seconds: float) -> None:
        """Wait until it has ended, for so long at most."""
        if self._thread.is_alive():
            self._thread.join(seconds)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                self._work(job, self._note)
            except Exception:  # an error of ours must not end the thread, on which requests wait
                logger.exception("a job of a KV offload thread failed")
                self._fail(job)
            finally:
                self._busy_since = None

    def _note(self) -> None:
        self._busy_since = self._clock()
