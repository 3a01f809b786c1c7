"""Ranks as threads of one process, each with a worker and an end of the communicator of its own.

They compute as ranks in processes do, and start in no time: what is the same bits here is so there. Used by the tests,
and by `python -m tests.parallel.matrix`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from quire.config.engine import QuireConfig
from quire.core.expert_group import ExpertGroup
from quire.distributed.seat import Seat
from quire.distributed.shared_memory import make_region, make_stage_regions
from quire.distributed.shared_pages import make_shared_pages
from quire.errors import CommunicationError
from quire.executor import registry
from quire.executor.uniproc import UniProcExecutor
from quire.platforms.interface import Platform
from quire.sample.logits_processor import ProcessorSource
from quire.worker.worker import Worker


class ThreadedRanks(UniProcExecutor):
    """As `MultiprocExecutor`, without its processes."""

    def __init__(
        self,
        config: QuireConfig,
        platform: Platform,
        logits_processors: Sequence[ProcessorSource] = (),
        *,
        experts: ExpertGroup | None = None,
    ) -> None:
        size, num_stages = config.parallel.num_ranks, config.parallel.pipeline_parallel_size
        fd, stage_fds = make_region(size), make_stage_regions(size, num_stages)
        fds = self._fds = make_shared_pages(size) if config.has_kv_tier else ()

        def seat(rank: int) -> Seat:
            return Seat(
                rank=rank, size=size, fd=fd, num_stages=num_stages, stage_fd=stage_fds[rank * num_stages // size],
                cache_fds=fds,
            )  # fmt: skip

        others: dict[int, Worker | BaseException] = {}

        def load(rank: int) -> None:
            try:
                others[rank] = Worker(config, platform, (), seat(rank), experts)
            except BaseException as error:
                others[rank] = error

        try:
            loading = [threading.Thread(target=load, args=(rank,)) for rank in range(1, size)]
            for thread in loading:
                thread.start()
            super().__init__(config, platform, logits_processors, seat(0), experts)
            for thread in loading:
                thread.join()
        finally:
            for region in (fd, *stage_fds):
                if region is not None:
                    os.close(region)
        workers = []
        for other in others.values():
            if isinstance(other, BaseException):
                raise other
            workers.append(other)
        self._threads = [threading.Thread(target=follow, args=(worker,)) for worker in workers]
        for thread in self._threads:
            thread.start()

    def shutdown(self) -> None:
        """End the other ranks."""
        if self._worker is not None:
            self._worker.abort(0)
            for thread in self._threads:
                thread.join()
            for fd in self._fds:
                os.close(fd)
        super().shutdown()


def follow(worker: Worker) -> None:
    """Until rank 0 ends."""
    try:
        worker.await_cache()
        worker.follow()
    except CommunicationError as error:
        assert error.message == "rank 0 has ended", error.message


def children_of(pid: int) -> list[int]:
    """Processes that the threads of a process have started and that run."""
    files = Path(f"/proc/{pid}/task").glob("*/children")
    return sorted(int(child) for file in files for child in file.read_text().split())


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and was not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@contextmanager
def ranks_as_threads() -> Iterator[None]:
    """Engines with several ranks that are made inside have them as threads; these end where something is raised."""
    made: list[ThreadedRanks] = []

    def make(*args: Any) -> ThreadedRanks:
        made.append(ThreadedRanks(*args))
        return made[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(registry.EXECUTORS, "mp", make)
        try:
            yield
        except BaseException:
            for executor in made:
                executor.shutdown()
            raise
