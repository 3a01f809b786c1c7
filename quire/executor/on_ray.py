"""RayExecutor: as `MultiprocExecutor`, with ranks that Ray places on the machines of its cluster.

Rank 0 stays in the engine core's process. Ray starts the others, and says when one has ended; steps go from rank to
rank over the communicator, through memory on one machine and over TCP between machines.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

import msgspec

from quire.config.engine import QuireConfig
from quire.core.expert_group import ExpertGroup
from quire.distributed.seat import Seat
from quire.errors import EngineDeadError, QuireError
from quire.executor.host_memory import HostInfo, OpenGroup
from quire.executor.multiproc import MultiprocExecutor
from quire.executor.rank_proc import RankAnswer
from quire.executor.ray_cluster import Placed, RayCluster
from quire.executor.ray_rank import RayRankSetup
from quire.logger import get_logger

logger = get_logger(__name__)

LOAD_TIMEOUT_S = 3600.0
NOTED_SILENCE_S = 2.0
SILENCE_POLL_S = 0.25
OWN_VARIABLES = "QUIRE_"


class RayRankHandle:
    """One rank other than 0.

    Args:
        on_exit: as of `RankProcess`.
    """

    def __init__(self, cluster: RayCluster, rank: int, placed: Placed, on_exit: Callable[[int, str], None]) -> None:
        self._cluster = cluster
        self._rank = rank
        self._placed = placed
        self._on_exit = on_exit
        self._loading: object = None
        self._is_closing = False
        self.pid: int | None = placed.info.pid if placed.info.node == cluster.own_node else None

    def begin(self, setup: RayRankSetup) -> None:
        """Let it join the group and load; returns at once."""
        self._loading = self._placed.actor.load.remote(msgspec.msgpack.encode(setup))

    def wait_ready(self) -> None:
        """Wait until its part of the model is loaded; then it follows rank 0.

        Raises:
            QuireError: it cannot be.
        """
        name = f"rank {self._rank} {self._placed.where}"
        answer = msgspec.msgpack.decode(self._cluster.result(self._loading, name, LOAD_TIMEOUT_S), type=RankAnswer)
        if answer.error is not None:
            raise msgspec.structs.replace(answer.error, message=f"{name}: {answer.error.message}").to_error()
        following = self._placed.actor.follow.remote()
        threading.Thread(target=self._watch, args=(following,), name=f"rank {self._rank}", daemon=True).start()

    def close(self) -> None:
        """End it; harmless when repeated."""
        self._is_closing = True
        self._cluster.end(self._placed)

    def _watch(self, following: object) -> None:
        try:
            reason = str(self._cluster.result(following, "it", None))
        except EngineDeadError as error:
            reason = error.message
        if not self._is_closing:
            self._on_exit(self._rank, f"rank {self._rank} ({self._placed.where}) is gone: {reason}")


class RayExecutor(MultiprocExecutor):
    """As `MultiprocExecutor`.

    Raises:
        ConfigError: there is no Ray, or its cluster cannot hold the ranks.
        QuireError: whatever keeps the model from loading, on any rank.
    """

    def _start_ranks(self, config: QuireConfig, size: int, timeout_s: float, experts: ExpertGroup | None) -> Seat:
        """Place the other ranks and connect to them."""
        cluster = self._cluster = RayCluster()
        parallel = config.parallel
        stage_size, num_stages = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
        placed = cluster.place(size, stage_size, config.device.num_threads or 1)
        handles = [RayRankHandle(cluster, rank, one, self._end) for rank, one in enumerate(placed, 1)]
        self._ranks += handles
        nodes = [cluster.own_node, *(one.info.node for one in placed)]
        addresses = [cluster.own_address, *(one.info.address for one in placed)]

        def open_on(rank: int) -> HostInfo:
            first = placed[rank - 1]
            opening = first.actor.open.remote(size, num_stages, first.info.address)
            return msgspec.msgpack.decode(cluster.result(opening, f"a rank {first.where}"), type=HostInfo)

        group = OpenGroup(config, nodes, addresses, open_on, timeout_s)
        self._region_fds += [fd for fd in (group.own.region, *group.own.stages) if fd is not None]
        self._cache_fds = group.own.caches
        for rank, handle in enumerate(handles, 1):
            handle.begin(RayRankSetup(config, group.place(rank), _own_variables()))
        where = [f"{rank} {one.where}" for rank, one in enumerate(placed, 1)]
        logger.info("ranks placed by Ray: 0 here (%s), %s", cluster.own_address, ", ".join(where))
        try:
            return group.own_seat()
        except QuireError:
            for handle in handles:  # one may say why it did not come
                handle.wait_ready()
            raise

    def watch_silence(self, show: Callable[[float], None]) -> None:
        """As `Executor.watch_silence`; the log has the rank."""
        if self._worker is not None and self._worker.silence is not None:
            threading.Thread(target=self._watch_silence, args=(show,), name="silence of ranks", daemon=True).start()

    def _watch_silence(self, show: Callable[[float], None]) -> None:
        longest_s, silent = 0.0, 0
        while (worker := self._worker) is not None:
            rank, silence_s = worker.silence or (0, 0.0)
            show(silence_s)
            if silence_s >= NOTED_SILENCE_S > longest_s:
                silent = rank
                logger.warning("nothing has come from rank %d for %.1f s; streams wait for it", rank, silence_s)
            elif silence_s < longest_s and longest_s >= NOTED_SILENCE_S:
                logger.warning("rank %d is back after %.1f s; streams continue", silent, longest_s)
            longest_s = silence_s
            time.sleep(SILENCE_POLL_S)

    def _close_group(self) -> None:
        super()._close_group()
        if hasattr(self, "_cluster"):
            self._cluster.close()


def _own_variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(OWN_VARIABLES)}
