"""RayRank: a rank other than 0, as an actor of Ray: a process with a worker that follows rank 0.

Ray makes it on some machine of its cluster (`ray_cluster`); what it is to do comes as bytes and is checked here. The
model's tensors never go through Ray.
"""

from __future__ import annotations

import gc
import importlib
import os
import socket
from typing import Any, NamedTuple

import msgspec

from quire import envs
from quire.config.engine import QuireConfig
from quire.core.wire import ErrorInfo
from quire.distributed.host_links import HostListener, HostPlan, connect_hosts
from quire.distributed.shared_memory import make_region, make_stage_regions
from quire.errors import CommunicationError, QuireError
from quire.executor.rank_proc import RankAnswer
from quire.logger import configure_logging, get_logger
from quire.utils.garbage import collector_paused
from quire.version import __version__

logger = get_logger(__name__)


class PlaceInfo(msgspec.Struct, frozen=True):
    """Where an actor runs.

    Attributes:
        node: of Ray's cluster.
        address: at which other machines reach it.
        host_name: for people.
        version: of Quire there.
    """

    node: str
    address: str
    host_name: str
    pid: int
    version: str = __version__


class HostInfo(msgspec.Struct, frozen=True):
    """What the first rank of a machine has opened for the others.

    Attributes:
        region: path of the memory that the ranks of the machine share.
        stages: likewise of the ranks of each pipeline stage; None = they share that of all ranks, or are one.
        port: where it listens for ranks of other machines.
    """

    region: str
    stages: list[str | None]
    port: int


class RayRankSetup(msgspec.Struct, frozen=True):
    """What a rank is given to start with.

    Attributes:
        config: resolved.
        region: `HostInfo.region` of its machine.
        stage: the one of `HostInfo.stages` that is its own.
        timeout_s: for which a rank waits for another.
        plan: of a group on several machines; None = all are here.
        connect_timeout_s: for connections to other machines.
        environment: Quire's own variables of the engine core.
    """

    config: QuireConfig
    rank: int
    size: int
    region: str
    stage: str | None
    timeout_s: float
    plan: HostPlan | None
    connect_timeout_s: float
    environment: dict[str, str] = {}


class OpenHost(NamedTuple):
    """What is open on a machine, in the process of its first rank, which closes the descriptors."""

    region: int
    stages: list[int | None]
    listener: HostListener | None
    info: HostInfo


def open_host(size: int, num_stages: int, address: str | None) -> OpenHost:
    """The memory that the ranks of this machine share, as descriptors and as paths for its other processes; and a
    listener where ranks of other machines come to `address`.
    """
    region, stages = make_region(size), make_stage_regions(size, num_stages)
    listener = None if address is None else HostListener(address)
    paths = [None if fd is None else _path_of(fd) for fd in stages]
    return OpenHost(
        region, stages, listener, HostInfo(_path_of(region), paths, 0 if listener is None else listener.port)
    )


def _path_of(fd: int) -> str:
    return f"/proc/{os.getpid()}/fd/{fd}"


class RayRank:
    """The actor. Methods are called in this order, `open` on the first rank of a machine alone."""

    def __init__(self) -> None:
        self._listener: HostListener | None = None
        self._rank = -1
        self._worker: Any = None

    def look(self, node: str, address: str) -> bytes:
        """Where it is: a `PlaceInfo`; the arguments where they are known already."""
        if not node:
            ray = importlib.import_module("ray")  # of the process that runs this
            node, address = ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()
        return msgspec.msgpack.encode(PlaceInfo(node, address, socket.gethostname(), os.getpid()))

    def open(self, size: int, num_stages: int, address: str) -> bytes:
        """Open this machine for its ranks, and for others where there is an address: a `HostInfo`."""
        opened = open_host(size, num_stages, address or None)
        self._listener = opened.listener
        return msgspec.msgpack.encode(opened.info)

    def load(self, data: bytes) -> bytes:
        """Join the group and load this rank's part of the model, as a `RayRankSetup` says: a `RankAnswer`."""
        try:
            setup = msgspec.msgpack.decode(data, type=RayRankSetup)
            self._rank = setup.rank
            self._load(setup)
        except Exception as error:
            if not isinstance(error, QuireError):
                logger.exception("rank %d cannot be loaded", self._rank)
            return msgspec.msgpack.encode(RankAnswer(ErrorInfo.of(error)))
        return msgspec.msgpack.encode(RankAnswer())

    def follow(self) -> str:
        """Compute what rank 0 says until the group ends; why it did."""
        assert self._worker is not None, "loaded before"
        try:
            self._worker.follow()
        except CommunicationError as error:
            return error.message
        except Exception as error:
            logger.exception("rank %d failed", self._rank)
            return f"{type(error).__name__}: {error}"
        return "it ended"

    def _load(self, setup: RayRankSetup) -> None:
        os.environ.update(setup.environment)
        configure_logging(setup.config.observability.log_level, setup.config.observability.log_format)
        envs.prefer_sleeping_threads()
        with collector_paused():
            from quire.distributed.seat import Seat  # late: loads torch
            from quire.platforms.detect import detect_platform
            from quire.worker.worker import Worker

            plan, sockets = setup.plan, None
            if plan is not None:
                sockets = connect_hosts(plan, setup.rank, self._listener, setup.connect_timeout_s)
            paths = [setup.region] if setup.stage is None else [setup.region, setup.stage]
            fds = [os.open(path, os.O_RDWR | os.O_CLOEXEC) for path in paths]
            try:
                seat = Seat(
                    rank=setup.rank, size=setup.size, fd=fds[0], timeout_s=setup.timeout_s, plan=plan, sockets=sockets,
                    num_stages=setup.config.parallel.pipeline_parallel_size,
                    stage_fd=None if setup.stage is None else fds[1],
                )  # fmt: skip
                self._worker = Worker(setup.config, detect_platform(setup.config.device.device), (), seat)
            finally:
                for fd in fds:
                    os.close(fd)
            gc.freeze()
