"""RayRank: a rank other than 0, as an actor of Ray: a process with a worker that follows rank 0.

Ray makes it on some machine of its cluster (`ray_cluster`); what it is to do comes as bytes and is checked here. The
model's tensors never go through Ray.
"""

from __future__ import annotations

import gc
import importlib
import os
import socket
from contextlib import ExitStack
from typing import Any

import msgspec

from quire import envs
from quire.config.engine import QuireConfig
from quire.core.wire import ErrorInfo
from quire.distributed.host_links import HostListener
from quire.errors import CommunicationError, QuireError
from quire.executor.host_memory import RankPlace, open_host, open_seat
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


class RayRankSetup(msgspec.Struct, frozen=True):
    """What a rank is given to start with.

    Attributes:
        config: resolved.
        environment: Quire's own variables of the engine core.
    """

    config: QuireConfig
    place: RankPlace
    environment: dict[str, str] = {}


class RayRank:
    """The actor. Methods are called in this order, `open` on the first rank of a machine alone."""

    def __init__(self) -> None:
        self._listener: HostListener | None = None
        self._rank = -1
        self._worker: Any = None
        self._seat = ExitStack()

    def look(self, node: str, address: str) -> bytes:
        """Where it is: a `PlaceInfo`; the arguments where they are known already."""
        if not node:
            ray = importlib.import_module("ray")  # of the process that runs this
            node, address = ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()
        return msgspec.msgpack.encode(PlaceInfo(node, address, socket.gethostname(), os.getpid()))

    def open(self, size: int, num_stages: int, address: str) -> bytes:
        """Open this machine for its ranks, and for those of other machines: a `HostInfo`."""
        opened = open_host(size, num_stages, address)
        self._listener = opened.listener
        return msgspec.msgpack.encode(opened.info)

    def load(self, data: bytes) -> bytes:
        """Join the group and load this rank's part of the model, as a `RayRankSetup` says: a `RankAnswer`."""
        try:
            setup = msgspec.msgpack.decode(data, type=RayRankSetup)
            self._rank = setup.place.rank
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
            self._worker.await_cache()
            self._seat.close()
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
            from quire.platforms.detect import detect_platform  # late: loads torch
            from quire.worker.worker import Worker

            seat = self._seat.enter_context(open_seat(setup.place, self._listener))
            self._worker = Worker(setup.config, detect_platform(setup.config.device.device), (), seat)
            gc.freeze()
