"""MultiprocExecutor: the model is computed by several processes of this machine, of which this one is rank 0.

Rank 0 computes in the engine core's process: what it samples needs no way back, and it is one process less. The others
follow what it sends (`worker.group_lead`). When one ends, so does the group: every wait ends, and with it the core.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

from quire.config.engine import QuireConfig
from quire.core.computed_step import ComputedStep
from quire.core.expert_group import ExpertGroup
from quire.core.kv_spec import KVCacheConfig
from quire.core.scheduler_output import SchedulerOutput
from quire.core.worker_call import WorkerCall
from quire.distributed.seat import Seat
from quire.distributed.shared_memory import make_region, make_stage_regions
from quire.distributed.shared_pages import make_shared_pages
from quire.errors import EngineDeadError
from quire.executor.rank_proc import RankSetup
from quire.executor.rank_process import Rank, RankProcess
from quire.executor.uniproc import UniProcExecutor
from quire.logger import get_logger
from quire.platforms.interface import Platform
from quire.sample.logits_processor import ProcessorSource

logger = get_logger(__name__)


class MultiprocExecutor(UniProcExecutor):
    """As `UniProcExecutor`, with ranks beside it. `call_worker` is for rank 0.

    Raises:
        QuireError: whatever keeps the model from loading, on any rank.
    """

    def __init__(
        self,
        config: QuireConfig,
        platform: Platform,
        logits_processors: Sequence[ProcessorSource] = (),
        *,
        experts: ExpertGroup | None = None,
    ) -> None:
        self._failure: str | None = None
        self._on_failure: Callable[[str], None] | None = None
        self._lock = threading.Lock()
        self._ranks: list[Rank] = []
        self._cache_fds: tuple[int, ...] = ()
        size = config.parallel.num_ranks
        if size == 1:
            super().__init__(config, platform, logits_processors, experts=experts)
            return
        self._region_fds: list[int] = []
        try:
            seat = self._start_ranks(config, size, config.supervision.rank_timeout_s, experts)
            super().__init__(config, platform, logits_processors, seat, experts)
            for process in self._ranks:
                process.wait_ready()
        except BaseException:
            self._close_group()
            raise
        finally:
            for fd in self._region_fds:
                os.close(fd)
        logger.info("%d ranks compute the model; processes of ranks 1 to %d: %s", size, size - 1, self.rank_pids)

    def _start_ranks(self, config: QuireConfig, size: int, timeout_s: float, experts: ExpertGroup | None) -> Seat:
        """Start the other ranks, which become `_ranks`; the seat of this one. `_region_fds` are closed when all are
        loaded.
        """
        num_stages = config.parallel.pipeline_parallel_size
        fd, stage_fds = make_region(size), make_stage_regions(size, num_stages)
        self._region_fds += [region for region in (fd, *stage_fds) if region is not None]
        fds = self._cache_fds = make_shared_pages(size) if config.has_kv_tier else ()
        stage_size = size // num_stages
        for rank in range(1, size):
            stage_fd = stage_fds[rank // stage_size]
            setup = RankSetup(config, rank, size, fd, stage_fd, timeout_s, os.getpid(), fds, experts)
            self._ranks.append(RankProcess(setup, self._end))
        return Seat(
            rank=0, size=size, fd=fd, num_stages=num_stages, stage_fd=stage_fds[0], timeout_s=timeout_s, cache_fds=fds
        )

    @property
    def rank_pids(self) -> Sequence[int | None]:
        """As `Executor.rank_pids`."""
        return [process.pid for process in self._ranks]

    def initialize_kv_cache(self, kv_cache_config: KVCacheConfig) -> None:
        """As `Worker.initialize_kv_cache`."""
        super().initialize_kv_cache(kv_cache_config)
        self._close_cache_fds()  # mapped

    def execute_model(self, scheduler_output: SchedulerOutput) -> ComputedStep:
        """As `Worker.execute_model`, with the other ranks."""
        self.check_health()
        return super().execute_model(scheduler_output)

    def call_worker(self, method: str | Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """As `Executor.call_worker`, of rank 0."""
        self.check_health()
        return super().call_worker(method, *args, **kwargs)

    def collective_rpc(self, call: WorkerCall) -> list[Any]:
        """As `Worker.collective_rpc`, with the other ranks."""
        self.check_health()
        return super().collective_rpc(call)

    def check_health(self) -> None:
        """Raise when a rank has ended."""
        if self._failure is not None:
            raise EngineDeadError(self._failure, hint="the other ranks cannot continue without it; create a new engine")

    def watch_failure(self, on_failure: Callable[[str], None]) -> None:
        """As `Executor.watch_failure`."""
        with self._lock:
            self._on_failure = on_failure
            failure = self._failure
        if failure is not None:
            on_failure(failure)

    def shutdown(self) -> None:
        """End the other ranks, and let go of the worker."""
        self._close_group()
        super().shutdown()

    def _close_group(self) -> None:
        for rank in self._ranks:
            rank.close()
        self._ranks.clear()
        self._close_cache_fds()

    def _close_cache_fds(self) -> None:
        fds, self._cache_fds = self._cache_fds, ()
        for fd in fds:
            os.close(fd)

    def _end(self, rank: int, reason: str) -> None:
        """A rank has ended without being asked: called by its thread."""
        logger.error("%s", reason)
        self._fail(rank, reason)

    def _fail(self, rank: int, reason: str) -> None:
        """End every wait for a rank."""
        with self._lock:
            self._failure = self._failure or reason
            on_failure = self._on_failure
        worker = self._worker if hasattr(self, "_worker") else None
        if worker is not None:
            worker.abort(rank)
        if on_failure is not None:
            on_failure(reason)
