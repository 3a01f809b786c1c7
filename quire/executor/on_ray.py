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
from quire.distributed.host_links import HostPlan, connect_hosts, new_key, number_hosts
from quire.distributed.seat import Seat
from quire.errors import EngineDeadError, QuireError
from quire.executor.multiproc import MultiprocExecutor
from quire.executor.rank_proc import RankAnswer
from quire.executor.ray_cluster import Placed, RayCluster
from quire.executor.ray_rank import HostInfo, OpenHost, RayRankSetup, open_host
from quire.logger import get_logger

logger = get_logger(__name__)

CONNECT_TIMEOUT_S = 60.0
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

    def _start_ranks(self, config: QuireConfig, size: int, timeout_s: float) -> Seat:
        """Place the other ranks and connect to them."""
        cluster = self._cluster = RayCluster()
        parallel = config.parallel
        stage_size, num_stages = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
        placed = cluster.place(size, stage_size, config.device.num_threads or 1)
        handles = [RayRankHandle(cluster, rank, one, self._end) for rank, one in enumerate(placed, 1)]
        self._ranks += handles
        own, plan, infos = self._open_hosts(cluster, placed, size, num_stages)
        self._region_fds += [fd for fd in (own.region, *own.stages) if fd is not None]
        hosts = [0] * size if plan is None else plan.hosts
        for rank, handle in enumerate(handles, 1):
            host = infos[hosts[rank]]
            setup = RayRankSetup(
                config, rank, size, host.region, host.stages[rank // stage_size], timeout_s, plan, CONNECT_TIMEOUT_S,
                _own_variables(),
            )  # fmt: skip
            handle.begin(setup)
        where = [f"{rank} {one.where}" for rank, one in enumerate(placed, 1)]
        logger.info("ranks placed by Ray: 0 here (%s), %s", cluster.own_address, ", ".join(where))
        sockets = None
        if plan is not None:
            try:
                sockets = connect_hosts(plan, 0, own.listener, CONNECT_TIMEOUT_S)
            except QuireError:
                for handle in handles:  # one may say why it did not come
                    handle.wait_ready()
                raise
        return Seat(
            rank=0, size=size, fd=own.region, num_stages=num_stages, stage_fd=own.stages[0], timeout_s=timeout_s,
            plan=plan, sockets=sockets,
        )  # fmt: skip

    def _open_hosts(
        self, cluster: RayCluster, placed: list[Placed], size: int, num_stages: int
    ) -> tuple[OpenHost, HostPlan | None, list[HostInfo]]:
        """The memory of each machine, by its first rank, and where these listen."""
        hosts = number_hosts([cluster.own_node, *(one.info.node for one in placed)])
        several = max(hosts) > 0
        own = open_host(size, num_stages, cluster.own_address if several else None)
        infos, addresses = [own.info], [(cluster.own_address, own.info.port)]
        for host in range(1, max(hosts) + 1):
            first = placed[hosts.index(host) - 1]
            data = cluster.result(
                first.actor.open.remote(size, num_stages, first.info.address), f"a rank {first.where}"
            )
            infos.append(msgspec.msgpack.decode(data, type=HostInfo))
            addresses.append((first.info.address, infos[-1].port))
        return own, HostPlan(hosts, addresses, new_key()) if several else None, infos

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
